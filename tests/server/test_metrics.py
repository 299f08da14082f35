"""A server tells its figures to Prometheus, where its operator wants that."""

import asyncio

import pytest

from swarm.errors import BadConfiguration
from swarm.server.metrics import MetricsLimits, answering, metrics_of
from tests.server.sites import Peer, Site
from tests.server.test_prefixes import opens, prompt_kept


async def got(address, request=b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"):
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer.decode()


def figures(text):
    return dict(line.split() for line in text.splitlines() if line.startswith("swarm_server_"))


async def test_figures_tell_what_is_held_and_what_was_reused(first: Site, owner: Peer):
    await prompt_kept(owner, first)
    await opens(owner, first)
    async with answering(("127.0.0.1", 0), lambda: metrics_of(first.server)) as address:
        head, body = (await got(address)).split("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200")
    told = {name.removeprefix("swarm_server_"): float(value) for name, value in figures(body).items()}
    assert told["prefix_tokens_held"] == 32
    assert told["prefix_positions_asked_total"] == 64
    assert told["prefix_positions_reused_total"] == 0  # until its first step
    assert told["cache_tokens_used"] == 32
    assert (told["sessions"], told["jobs_total"]) == (1, 1)


async def test_request_that_is_too_long_or_does_not_end_gets_nothing():
    limits = MetricsLimits(request_bytes=64, request_s=0.05)
    async with answering(("127.0.0.1", 0), lambda: "x 1\n", limits) as address:
        assert await got(address, b"GET / HTTP/1.1\r\nX: " + b"a" * 200 + b"\r\n\r\n") == ""
        assert await got(address, b"GET / HTTP/1.1\r\n") == ""
        assert (await got(address)).endswith("\r\n\r\nx 1\n")


async def test_address_in_use_is_said():
    async with answering(("127.0.0.1", 0), str) as address:
        with pytest.raises(BadConfiguration, match="--metrics"):
            async with answering(address, str):
                pass


async def test_without_an_address_nothing_listens():
    async with answering(None, str) as address:
        assert address is None
