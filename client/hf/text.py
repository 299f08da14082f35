"""Text in, text out: `swarm-generate` with a distributed model."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer, set_seed
from transformers.generation.streamers import BaseStreamer

from swarm.client.hf.auto import AutoDistributedModel
from swarm.client.hf.head import HeadMode
from swarm.errors import BadConfiguration


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How to continue a prompt. temperature 0: the likeliest token; chat: put the prompt into the chat template."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    chat: bool


def stream_text(
    name: str,
    prompt: str,
    options: TextOptions,
    *,
    head: HeadMode = "exact",
    **joining: Any,  # noqa: ANN401 - handed on to from_pretrained, which names and types them
) -> None:
    """Generate through the swarm and print as it comes. Raises SwarmError."""
    model = AutoDistributedModel.from_pretrained(name, head=head, **joining)
    try:
        tokenizer = model.checkpoint.texts().tokenizer()
        _ = model.route  # missing blocks are reported before the prompt is printed
        streamer = TextStreamer(tokenizer, skip_prompt=options.chat, skip_special_tokens=True)
        continue_prompt(model, tokenizer, prompt, options, streamer)
        if head != "exact":
            print(model.head_facts, file=sys.stderr)
    finally:
        model.close()


def continue_prompt(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    options: TextOptions,
    streamer: BaseStreamer | None = None,
) -> torch.Tensor:
    """Generate, and hand every token to the streamer as it comes. Returns all token ids, [1, positions]."""
    if options.seed is not None:
        set_seed(options.seed)
    inputs: Any = _in_template(tokenizer, prompt) if options.chat else tokenizer(prompt, return_tensors="pt")
    sampling = {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p}
    generating: Any = model  # PreTrainedModel does not declare generate(); every causal language model has it
    tokens: torch.Tensor = generating.generate(
        inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=options.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        streamer=streamer,
        **(sampling if options.temperature else {"do_sample": False}),
    )
    return tokens


def _in_template(tokenizer: PreTrainedTokenizerBase, prompt: str) -> Any:  # noqa: ANN401 - a dictionary of tensors
    """Put a prompt into the chat template. Raises BadConfiguration where there is none, or it refuses the prompt."""
    if not tokenizer.chat_template:
        raise BadConfiguration("--chat", "the model has no chat template; leave it out")
    messages = [{"role": "user", "content": prompt}]
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except Exception as error:  # noqa: BLE001 - a template is a program, and says what it does not take
        raise BadConfiguration("--chat", f"the model's template refuses the prompt: {str(error)[:200]}") from None
