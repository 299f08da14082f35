"""A client in a process of its own, for a host of the lab: it generates, and writes each token when it has it.

`python -m tests.support.lab.generation REQUEST.json RESULT.jsonl`. The result's lines are {"joined_s"}, then
{"token", "at_s"} for each token, and {"tokens", "route", "hops"} after each round.
"""

import json
import sys
import time
from pathlib import Path
from typing import IO, Any

import torch
from pydantic import BaseModel, ConfigDict
from transformers import AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from swarm import AutoDistributedModel


class GenerationRequest(BaseModel):
    """What is generated. options: more arguments of `from_pretrained`. paced: each round waits for its file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    checkpoint: str
    initial_peers: tuple[str, ...]
    network: str
    prompt: str
    tokens: int
    rounds: int = 1
    paced: bool = False
    options: dict[str, str | int | float] = {}


class _Writer(BaseStreamer):  # type: ignore[misc]
    """Writes the tokens as they come, with the seconds since the round began."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._prompt_seen = file, False
        self._began = time.monotonic()

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            say(self._file, token=int(value.item()), at_s=time.monotonic() - self._began)
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing: the round's own line says it."""


def say(file: IO[str], **facts: Any) -> None:
    """Write one line, at once."""
    file.write(json.dumps(facts) + "\n")
    file.flush()


def go_file(results: Path, number: int) -> Path:
    """Return the file for which a paced round waits."""
    return results.with_suffix(f".go-{number}")


def main() -> None:
    """Generate as the request says."""
    torch.set_num_threads(1)
    request = GenerationRequest.model_validate_json(Path(sys.argv[1]).read_text())
    ids = AutoTokenizer.from_pretrained(request.checkpoint)(request.prompt, return_tensors="pt").input_ids
    with Path(sys.argv[2]).open("w") as file:
        began = time.monotonic()
        model = AutoDistributedModel.from_pretrained(
            request.checkpoint,
            initial_peers=request.initial_peers,
            network=request.network,
            dtype=torch.float32,
            audit=0.0,
            **request.options,
        )
        say(file, joined_s=time.monotonic() - began)
        with model:
            for number in range(request.rounds):
                while request.paced and not go_file(Path(sys.argv[2]), number).exists():
                    time.sleep(0.01)
                writer = _Writer(file)
                out = model.generate(ids, max_new_tokens=request.tokens, do_sample=False, streamer=writer)
                hops = [{"peer": hop.peer_id, "blocks": str(hop.blocks)} for hop in model.route]
                say(file, tokens=out[0, ids.shape[1] :].tolist(), route=hops)


if __name__ == "__main__":
    main()
