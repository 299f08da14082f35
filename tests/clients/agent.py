"""A scripted model that an agent's loop can be tested with: it calls the tool that it is given, then tells its result.

It reads the prompt as the scripted template writes it. "Say: X" makes it say X, or call the tool with X as arguments.
"""

import json
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from swarm.gateway.generation import Generation

TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.DOTALL)
ASKED = re.compile(r"Say: (.*)", re.DOTALL)
SAMPLES = {"string": "Rome", "integer": 3, "number": 0.5, "boolean": True, "array": [], "object": {}}


class Agent:
    """A script for `tests.gateway.scripted`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __call__(self, generation: Generation) -> str:
        prompt = str(self._tokenizer.decode(list(generation.prompt)))
        turns = TURN.findall(prompt)
        if not turns:
            return " and so on"
        role, content = turns[-1]
        if role == "tool":
            return f"The tool says: {content}"
        said = ASKED.search(content)
        behind = prompt.rpartition("<|im_end|>\n")[2].partition("<|im_start|>")[0].strip()
        if behind.startswith("["):
            function = json.loads(behind)[0]["function"]
            arguments = said[1] if said and said[1].startswith("{") else json.dumps(sample(function["parameters"]))
            return f'<tool_call>{{"name": "{function["name"]}", "arguments": {arguments}}}</tool_call>'
        return said[1] if said else "Hello to you."


def sample(schema: dict[str, Any]) -> Any:
    """A value of a simple schema."""
    if schema.get("type") == "object":
        return {name: sample(part) for name, part in schema.get("properties", {}).items()}
    return SAMPLES[schema.get("type", "string")]
