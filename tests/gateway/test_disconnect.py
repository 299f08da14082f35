"""A client that goes away in the midst of a repair frees its leases on every server at once."""

import asyncio
import socket
from contextlib import asynccontextmanager

import httpx
import pytest
from transformers import AutoTokenizer

from swarm.gateway.answering import Model
from swarm.gateway.app import Gateway, make_app
from swarm.gateway.engine import EngineLimits
from swarm.gateway.text import TokenTexts
from swarm.web import WebServer, url_of
from tests.gateway.conftest import engine_of
from tests.gateway.scripted import NAME, ScriptedModels
from tests.support.inprocess import inprocess
from tests.support.often import rest_is_long
from tests.support.swarms import DEMO_CHECKPOINT

SPANS = ("0:1", "1:4", "4:6")
WITHIN_S = 1.0
BODY = {"model": NAME, "prompt": list(range(5, 45)), "max_tokens": 200, "temperature": 0, "stream": True}


@asynccontextmanager
async def gateway(engine):
    """Serve an engine over HTTP, in the test's loop. Yields the URL."""
    tokenizer, started = AutoTokenizer.from_pretrained(DEMO_CHECKPOINT), asyncio.Event()
    model = Model(NAME, "0" * 64, engine, tokenizer, frozenset(), TokenTexts(tokenizer))
    server = WebServer(make_app(Gateway(ScriptedModels(model))), started.set)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        await started.wait()
        try:
            yield url_of(listening)
        finally:
            server.should_exit = True
            await serving


@asynccontextmanager
async def begun(url):
    """A stream that has its first tokens. Its connection closes with the block."""
    async with (
        httpx.AsyncClient(timeout=30) as client,
        client.stream("POST", url + "/v1/completions", json=BODY) as got,
    ):
        lines = got.aiter_lines()
        told = 0
        while told < 3:
            told += (await anext(lines)).startswith("data: ")
        yield


async def until(condition, within_s):
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def repairing(checkpoint, *spares, limits=None):
    """A stream over a gateway, one of whose hops has just crashed. Yields the swarm, the session and the survivors."""
    with inprocess(checkpoint, *SPANS, *spares) as swarm:
        async with engine_of(swarm, limits) as engine, gateway(engine) as url:
            async with begun(url):
                (session,) = engine.swarm.sessions.open_sessions
                lost = session.route[1].peer_id
                crashed = next(server for server in swarm.servers if server.me.identity.peer_id == lost)
                survivors = [server for server in swarm.servers if server is not crashed]
                await asyncio.to_thread(swarm.crash, crashed)
                await until(lambda: not session._circuit.is_standing or session.repairs, 5)
                yield swarm, session, survivors
            hosted = lambda: sum(len(server.handler.sessions) for server in survivors)  # noqa: E731
            await until(lambda: not hosted(), WITHIN_S)
            assert not engine.swarm.sessions.open_sessions


@pytest.mark.parametrize("after_s", rest_is_long([0.0, 0.005, 0.02, 0.05], [0.005]))
async def test_disconnect_while_a_spare_takes_over_frees_all_leases(checkpoint, after_s):
    async with repairing(checkpoint, "1:4"):
        await asyncio.sleep(after_s)


@pytest.mark.long
async def test_disconnect_while_the_session_waits_for_blocks_frees_all_leases(checkpoint):
    async with repairing(checkpoint, limits=EngineLimits(wait_for_blocks_s=30.0)) as (_, session, survivors):
        assert session.repairs == 0
        assert any(server.handler.sessions for server in survivors)


@pytest.mark.long
async def test_disconnect_while_a_spare_does_not_answer_frees_all_leases(checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        limits = EngineLimits(wait_for_blocks_s=30.0)
        async with repairing(checkpoint, limits=limits) as (swarm, session, _):
            await asyncio.to_thread(swarm.serve, "1:4", announce=(address,))
            async with asyncio.timeout(10):
                connection, _ = await asyncio.get_running_loop().sock_accept(silent)
            assert session.repairs == 0
        connection.close()
