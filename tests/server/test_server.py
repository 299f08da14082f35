"""A server measures its span, and reads as fast as that computes."""

import asyncio
import time

import pytest

from swarm.model.span import Span
from swarm.server import server as server_module
from swarm.server.server import ServerLimits
from tests.server.sites import HIDDEN, Site


async def test_a_span_that_cannot_be_measured_serves_all_the_same(first: Site, monkeypatch: pytest.MonkeyPatch):
    def broken(_: Span):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(server_module, "measure_throughput", broken)
    await first.server.measure()
    assert first.server.announcement("online").decode_tps is None


async def test_activations_are_read_as_fast_as_the_span_needs_them(first: Site):
    limits = ServerLimits()
    await first.server.measure()
    assert first.server.throughput is not None
    needed = limits.inflow_share * first.server.throughput.prefill_tps * HIDDEN * 4
    assert first.server.listener.flow.read.per_s == max(limits.inflow_bytes_per_s_min, needed)


async def test_a_server_may_leave_while_it_is_measured(first: Site, monkeypatch: pytest.MonkeyPatch):
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    monkeypatch.setattr(server_module, "measure_throughput", lambda _: time.sleep(0.2))
    measuring = asyncio.create_task(first.server.measure())
    await asyncio.sleep(0.05)
    measuring.cancel()
    await asyncio.sleep(0.4)
    assert reported == []
