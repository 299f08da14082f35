"""A grant that ends in the middle of a generation costs nothing but another one, in a session of any age."""

import asyncio
from dataclasses import replace

import pytest
import torch

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.session.session import Session
from swarm.server.limits import HandlerLimits, HostedLimits
from tests.simulation.loop import VirtualLoop
from tests.simulation.model import HashSpan, embed
from tests.simulation.village import HORIZON_S, PLAN, Village, finished
from tests.simulation.world import N_BLOCKS

LATE = HandlerLimits(session=HostedLimits(next_record_late_s=120.0))


@pytest.mark.parametrize("pause_s", [0.0, 600.0], ids=["soon", "after its records have ended"])
@pytest.mark.parametrize("every", [True, False], ids=["all hops'", "the last hop's"])
def test_session_keeps_its_hops_when_its_grants_end(every: bool, pause_s: float) -> None:
    loop = VirtualLoop(HORIZON_S)

    async def generate() -> None:
        village = Village(loop, "allowed_peers", 3, LATE)
        await asyncio.sleep(25.0)
        async with village.swarm:
            await talk(village, await village.swarm.open(Blocks(0, N_BLOCKS), PLAN))
        await village.client.sessions.close()

    async def talk(village: Village, session: Session) -> None:
        past = (local := HashSpan(Blocks(0, N_BLOCKS))).new_cache()
        before = [hop.process for hop in session.route]
        for number in range(4):
            if number == 2:
                await asyncio.sleep(pause_s)
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

    finished(loop, generate())
