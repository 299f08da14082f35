"""Synthetic generations through the swarm, as any client makes them. A process of its own: it needs torch and hivemind.

`python -m swarm.monitor.probe MODEL --every 300 --initial-peers ...` prints one JSON object per generation; see
`swarm.monitor.probing`, which runs it for the health page.

The clock starts when a user would press enter: the time to the first token includes finding a route and opening a
session. The model is loaded once.
"""

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch
from transformers.generation.streamers import BaseStreamer

from swarm.client.hf.auto import AutoDistributedModel
from swarm.commands import configure_logging, run_click
from swarm.errors import SwarmError
from swarm.model.checkpoint import open_checkpoint
from swarm.monitor.probing import ProbeLine
from swarm.options import LOG_LEVELS, NETWORK, Number, access_options, split_peers


class _Times(BaseStreamer):
    """Notes when each token came."""

    def __init__(self) -> None:
        self.at: list[float] = []  # of the prompt, then of each token

    def put(self, value: Any) -> None:  # noqa: ANN401 - the base class's own signature
        """Take the prompt, then one token at a time."""
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """The generation is over."""


def probe_once(
    model: Any,  # noqa: ANN401 - a PreTrainedModel, whose generate() is not declared
    root: str,
    prompt_tokens: int = 8,
    new_tokens: int = 17,
) -> ProbeLine:
    """Generate a few tokens from a fixed prompt and say how long each took. A failure is an answer, too.

    new_tokens: the first, and 16 gaps.
    """
    prompt = torch.arange(1, prompt_tokens + 1)[None]
    times = _Times()
    at, began = time.time(), time.perf_counter()
    try:
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,  # even if the model would end earlier
            do_sample=False,
            pad_token_id=0,
            streamer=times,
        )
    except SwarmError as error:
        return ProbeLine(root=root, at=at, ok=False, why=str(error)[:200])
    return ProbeLine(
        root=root,
        at=at,
        ok=True,
        ttft_ms=(times.at[1] - began) * 1000,
        gaps_ms=tuple((later - earlier) * 1000 for earlier, later in pairwise(times.at[1:])),
    )


@click.command("probe")
@click.argument("model")
@click.option("--every", type=Number(1.0), required=True, help="seconds")
@click.option("--initial-peers", multiple=True, callback=split_peers)
@click.option("--network", type=NETWORK, default="public")
@access_options
@click.option("--identity", type=click.Path(path_type=Path), default=None)
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="warning")
def command(
    model: str,
    every: float,
    log_level: str,
    **joining: Any,  # noqa: ANN401 - handed on to from_pretrained, which names and types them
) -> None:
    """Generate through the swarm again and again; print how each went."""
    configure_logging(log_level)
    root = open_checkpoint(model).root
    while True:
        began = time.monotonic()
        try:
            with AutoDistributedModel.from_pretrained(model, step_timeout_s=60.0, quality="any", **joining) as joined:
                while True:
                    began = time.monotonic()
                    line = probe_once(joined, root)
                    print(line.model_dump_json(), flush=True)
                    _rest(every, began)
                    if not line.ok:
                        break  # join anew
        except SwarmError as error:
            print(ProbeLine(root=root, at=time.time(), ok=False, why=str(error)[:200]).model_dump_json(), flush=True)
            _rest(every, began)


def _rest(every_s: float, began: float) -> None:
    time.sleep(max(0.0, every_s - (time.monotonic() - began)))


if __name__ == "__main__":
    run_click(command)
