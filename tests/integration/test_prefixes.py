"""Real processes keep the beginnings of a gateway's prompts; a server that is killed costs time, and no text."""

import asyncio
import json
from collections.abc import Callable, Sequence

import httpx
import pytest
import torch

from tests.integration.test_gateway import gateway
from tests.support.swarms import DEMO_CHECKPOINT, world

SYSTEM = "def read_lines(path):\n    return open(path)\n\nclass Reader:\n    def __init__(self, path):\n" * 4
BLOCK = 64
TAILS = ("        self.path = path\n", "        return None\n", "        self.lines = []\n")


async def answered(
    client: httpx.AsyncClient, model: str, tail: str, on_text: Callable[[], None] = lambda: None
) -> tuple[str, int]:
    """Stream one completion. Returns its text, and how many tokens of its prompt were cached."""
    body = {"model": model, "prompt": SYSTEM + tail, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    text, usage = "", {}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                told = json.loads(line[6:])
                assert "error" not in told, told
                text += "".join(choice["text"] for choice in told["choices"])
                usage = told.get("usage") or usage
                if text:
                    on_text()
    return text, usage["prompt_tokens_details"]["cached_tokens"]


async def all_answered(url: str, model: str, tails: Sequence[str]) -> list[tuple[str, int]]:
    """Stream completions, all at once."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        return await asyncio.gather(*(answered(client, model, tail) for tail in tails))


@pytest.mark.long
async def test_common_beginning_is_computed_once_and_kills_change_no_text(tmp_path):
    with world(DEMO_CHECKPOINT, tmp_path, ("0:6", "6:12"), torch.float32) as running:
        swarm = running.swarm
        with gateway(swarm, "--prefixes", "none") as (url, model):
            plain = await all_answered(url, model, TAILS)
        with gateway(swarm) as (url, model):
            first = await all_answered(url, model, TAILS[:1])
            others = await all_answered(url, model, TAILS[1:])  # one goes on with the first's session, one does not
            assert [text for text, _ in (*first, *others)] == [text for text, _ in plain]
            assert first[0][1] == 0
            assert min(cached for _, cached in others) >= BLOCK
        with gateway(swarm) as (url, model):
            await all_answered(url, model, TAILS[:1])
            spares = [swarm.start_server(blocks, "--dtype", "float32") for blocks in ("0:6", "6:12")]
            for spare in spares:
                await asyncio.to_thread(spare.wait_ready)
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                killed = []

                def kill() -> None:
                    while len(killed) < 2:
                        killed.append(swarm.servers[len(killed)])
                        killed[-1].kill()

                busy = asyncio.create_task(answered(client, model, TAILS[1]))  # it takes the idle session
                disturbed = await asyncio.gather(busy, answered(client, model, TAILS[2], kill))
    assert [text for text, _ in disturbed] == [text for text, _ in plain[1:]]
    assert len(killed) == 2
