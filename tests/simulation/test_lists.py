"""Lists of peers hold through every repair: who is not on them gets nothing, however often a route breaks."""

import asyncio
from random import Random
from typing import TypeVar

import pytest
import torch

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.session.plan import SessionPlan
from swarm.errors import NoRoute
from tests.simulation.loop import VirtualLoop
from tests.simulation.model import HashSpan, embed, greedy
from tests.simulation.village import HORIZON_S, PLAN, Village, finished
from tests.simulation.world import N_BLOCKS, ROOT
from tests.support.often import rest_is_long

Result = TypeVar("Result")
REROUTES = 150  # of all lists together
REROUTES_LONG = 1000
TOKENS = 16  # of one session
REASONS = {
    "allowed_peers": "outside allowed_peers or in blocked_peers",
    "blocked_peers": "outside allowed_peers or in blocked_peers",
    "trusted_peers": "trusted_peers does not name",
}


async def broken_session(village: Village, source: Random) -> int:
    """Generate while a hop dies before every token; returns how often the route was repaired."""
    session = await village.swarm.open(Blocks(0, N_BLOCKS), PLAN)
    local = HashSpan(Blocks(0, N_BLOCKS))
    past, tokens = local.new_cache(), [[1, 2, 3]]
    for _ in range(TOKENS):
        village.kill(source.choice(session.route).peer_id)
        got = await session.step(Activations(embed(tokens)), want=1)
        expected = local.forward(embed(tokens), cache=past, positions=None, mask=None)[:, -1:]
        assert torch.equal(got, expected)
        assert {hop.peer_id for hop in session.route} <= village.listed
        tokens = [[token] for token in greedy(expected)]
    await session.close()
    return session.repairs


def run(kind: str, seed: int, reroutes: int) -> int:
    """Break the route again and again; returns how often it was repaired."""
    loop = VirtualLoop(HORIZON_S)

    async def generate() -> int:
        village, source = Village(loop, kind, seed), Random(seed)
        await asyncio.sleep(25.0)
        repairs = 0
        while repairs < reroutes:
            repairs += await broken_session(village, source)
        heard = village.heard() - {village.client.process.me.identity.peer_id}
        assert heard <= village.listed
        assert heard == village.listed  # the route went round
        await village.client.sessions.close()
        return repairs

    return finished(loop, generate())


@pytest.mark.parametrize("reroutes", rest_is_long([REROUTES, REROUTES_LONG], [REROUTES]))
@pytest.mark.parametrize("kind", rest_is_long(["allowed_peers", "blocked_peers", "trusted_peers"], ["allowed_peers"]))
def test_unlisted_peer_gets_no_frame_over_forced_reroutes(kind: str, reroutes: int) -> None:
    assert run(kind, 1, -(-reroutes // 3)) >= reroutes // 3


@pytest.mark.parametrize("kind", ["allowed_peers", "blocked_peers", "trusted_peers"])
def test_a_repair_fails_rather_than_leave_the_list(kind: str) -> None:
    loop = VirtualLoop(HORIZON_S)

    async def generate() -> None:
        village = Village(loop, kind, 7)
        await asyncio.sleep(25.0)
        plan = SessionPlan(root=ROOT, positions_max=64, rollback_max=0, step_timeout_s=30.0, wait_for_blocks_s=0.0)
        session = await village.swarm.open(Blocks(0, N_BLOCKS), plan)
        await session.step(Activations(embed([[1, 2, 3]])), want=1)
        lost = session.route[-1]
        for peer in village.holders(lost.blocks.stop - 1):
            village.kill(peer, comes_back=False)
        with pytest.raises(NoRoute, match=REASONS[kind]) as failed:
            await session.step(Activations(embed([[4]])), want=1)
        assert lost.blocks.stop - 1 in failed.value.missing
        assert village.heard() <= village.listed | {village.client.process.me.identity.peer_id}
        await village.client.sessions.close()

    finished(loop, generate())
