"""What a gateway does for ever, beside requests."""

import asyncio

from swarm.gateway import serve
from tests.support.swarms import eventually


async def test_freed_memory_goes_back_again_and_again(monkeypatch):
    given_back = []
    monkeypatch.setattr(serve, "return_free_memory", lambda: given_back.append(True))
    with serve.computing(1) as compute:
        giving = asyncio.create_task(serve._give_back(compute, 0.01))
        await asyncio.to_thread(eventually, lambda: len(given_back) > 2, 10)
        giving.cancel()
