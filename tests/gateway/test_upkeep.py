"""What a gateway does for ever, beside requests."""

import asyncio

import pytest
from click.testing import CliRunner

from swarm.gateway import serve
from swarm.gateway.cli import command
from tests.support.swarms import eventually


async def test_freed_memory_goes_back_again_and_again(monkeypatch):
    given_back = []
    monkeypatch.setattr(serve, "return_kept_memory", lambda: given_back.append(True))
    with serve.computing(1) as compute:
        giving = asyncio.create_task(serve._give_back(compute, 0.01))
        await asyncio.to_thread(eventually, lambda: len(given_back) > 2, 10)
        giving.cancel()


async def test_a_conversation_that_does_not_close_ends_no_gateway():
    class Models:
        tries = 0

        async def close_old(self):
            self.tries += 1
            raise KeyError("unexpected")

    models = Models()
    closing = asyncio.create_task(serve._close_old(models, 0.01))
    await asyncio.to_thread(eventually, lambda: models.tries > 2, 10)
    closing.cancel()


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "601"])
def test_what_is_no_time_is_refused(seconds):
    said = CliRunner().invoke(command, ["--keep-conversations", seconds])
    assert said.exit_code == 2
    assert "--keep-conversations" in said.output
