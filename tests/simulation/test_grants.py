"""A grant that ends in the middle of a generation costs nothing but another one."""

import asyncio
from dataclasses import replace

import pytest
import torch

from swarm.activations import Activations
from swarm.blocks import Blocks
from tests.simulation.loop import VirtualLoop
from tests.simulation.model import HashSpan, embed
from tests.simulation.village import HORIZON_S, PLAN, Village, finished
from tests.simulation.world import N_BLOCKS


@pytest.mark.parametrize("every", [True, False], ids=["all hops'", "the last hop's"])
def test_session_keeps_its_hops_when_its_grants_end(every: bool) -> None:
    loop = VirtualLoop(HORIZON_S)

    async def generate() -> None:
        village = Village(loop, "allowed_peers", 3)
        await asyncio.sleep(25.0)
        session = await village.swarm.open(Blocks(0, N_BLOCKS), PLAN)
        past = (local := HashSpan(Blocks(0, N_BLOCKS))).new_cache()
        before = [hop.process for hop in session.route]
        for number in range(4):
            if number == 2:
                for hop in session.route if every else session.route[-1:]:
                    (hosted,) = village.host(hop.peer_id).handler.sessions.values()
                    over = replace(hosted.seat.grant, ends_at=loop.time() - 1)
                    hosted.seat = replace(hosted.seat, grant=over)
            hidden = embed([[number, 7]])
            got = await session.step(Activations(hidden), want=1)
            assert torch.equal(got, local.forward(hidden, cache=past, positions=None, mask=None)[:, -1:])
        assert [hop.process for hop in session.route] == before
        assert session.repairs == 1
        await session.close()
        await village.client.sessions.close()

    finished(loop, generate())
