"""`swarm-gateway` over a swarm of real processes: answers are whole, and the same, while servers are killed."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from swarm.demo.local import LocalSwarm
from tests.support.swarms import DEMO_CHECKPOINT, DEMO_SPANS, world

CODE = "def read_lines(path):\n    return open(path)\n\nclass Reader:\n    def __init__(self, path):\n"


@contextmanager
def gateway(swarm: LocalSwarm, *options: str) -> Iterator[tuple[str, str]]:
    """Run the command on a swarm. Yields its URL and its model's name; it must end in order."""
    running = swarm.start_gateway("--dtype", "float32", "--threads", "1", *options).wait_ready()
    try:
        yield running.ready["url"], running.ready["models"][0]
    finally:
        code = running.stop()
    assert code == 0, running.last_lines()


@dataclass
class Stream:
    """One answer as it comes: pieces of text, and how the stream ended."""

    pieces: list[str] = field(default_factory=list)
    done: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


async def completed(client: httpx.AsyncClient, body: dict) -> Stream:
    """Stream one completion."""
    stream = Stream()
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                stream.done = True
            elif line.startswith("data: "):
                told = json.loads(line[6:])
                assert "error" not in told, told
                stream.pieces.append(told["choices"][0]["text"])
    return stream


async def all_completed(url: str, bodies: list[dict]) -> list[Stream]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        return await asyncio.gather(*(completed(client, body) for body in bodies))


@pytest.mark.slow("eight processes, 512 tokens twice, three kills")
async def test_streams_are_byte_identical_while_servers_are_killed(tmp_path):
    with (
        world(DEMO_CHECKPOINT, tmp_path, DEMO_SPANS * 2, torch.float32) as running,
        gateway(running.swarm) as (url, name),
    ):
        bodies = [
            {"model": name, "prompt": CODE[: 20 + 6 * i], "max_tokens": 64, "ignore_eos": True, **sampling}
            for i in range(4)
            for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": i})
        ]
        undisturbed = await all_completed(url, bodies)
        generating = asyncio.create_task(all_completed(url, bodies))
        for server in running.swarm.servers[:3]:
            await asyncio.sleep(0.6)
            server.kill()
        disturbed = await generating
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert after.done
        assert after.text == before.text


@pytest.mark.slow("a whole swarm of processes")
async def test_gateway_gives_the_local_models_text_and_ends_in_order(tmp_path):
    with (
        world(DEMO_CHECKPOINT, tmp_path, ("0:12",), torch.float32) as running,
        gateway(running.swarm) as (url, name),
    ):
        body = {"model": name, "prompt": CODE, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        (stream,) = await all_completed(url, [body])
    tokenizer = AutoTokenizer.from_pretrained(DEMO_CHECKPOINT)
    ids = tokenizer(CODE, return_tensors="pt")["input_ids"]
    expected = running.full.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert stream.text == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
