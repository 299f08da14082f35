"""Servers keep the beginnings of prompts for their owner: later sessions begin behind them, and get the same tokens."""

import asyncio
from dataclasses import replace

import pytest

from swarm.gateway.conversations import ConversationLimits
from swarm.gateway.engine import EngineLimits
from swarm.gateway.generation import Generation, Sampling, Started
from swarm.protocol.marks import MarkLimits
from tests.gateway.conftest import engine_of
from tests.gateway.test_engine import GREEDY, crash, ids_of, local, run
from tests.support.inprocess import inprocess

BLOCK = 16
LIMITS = EngineLimits(conversations=ConversationLimits(sessions_max=0), marks=MarkLimits(block_positions=BLOCK))
SYSTEM = ids_of(40, seed=1)
HELD = 2 * BLOCK


def asked(tail: int, owner: str = "", **fields: object) -> Generation:
    """A generation whose prompt begins with the common 40 tokens."""
    prompt = (*SYSTEM, *ids_of(5, seed=tail))
    return Generation(prompt=prompt, tokens_max=6, sampling=GREEDY, owner=owner, **fields)


async def test_second_session_begins_behind_the_common_blocks(checkpoint, full):
    with inprocess(checkpoint, "0:2", "2:6") as swarm:
        async with engine_of(swarm, LIMITS) as engine:
            for tail, held in ((2, 0), (3, HELD)):
                tokens, others = await run(engine, asked(tail))
                assert others[0] == Started(held)
                assert tokens == local(full, asked(tail).prompt, 6)


async def test_many_at_once_begin_behind_what_the_first_has_left(checkpoint, full):
    with inprocess(checkpoint, "0:3", "3:6") as swarm:
        async with engine_of(swarm, LIMITS) as engine:
            await run(engine, asked(2))
            results = await asyncio.gather(*(run(engine, asked(tail)) for tail in range(3, 9)))
    for tail, (tokens, others) in zip(range(3, 9), results, strict=True):
        assert others[0] == Started(HELD)
        assert tokens == local(full, asked(tail).prompt, 6)


@pytest.mark.parametrize(
    ("use", "of_another", "of_the_same"), [("own", 0, HELD), ("shared", HELD, HELD), ("none", 0, 0)]
)
async def test_tenant_finds_its_own_beginnings_unless_all_are_shared(swarm, use, of_another, of_the_same):
    async with engine_of(swarm, replace(LIMITS, prefixes=use)) as engine:
        await run(engine, asked(2, "ada"))
        for owner, held in (("bob", of_another), ("ada", of_the_same)):
            _, others = await run(engine, asked(3, owner))
            assert others[0] == Started(held)


async def test_echo_has_every_position_computed(engine_with_prefixes, full):
    await run(engine_with_prefixes, asked(2))
    echoed = replace(asked(2), echo=True, sampling=Sampling(temperature=0, logprobs=0))
    _, others = await run(engine_with_prefixes, echoed)
    assert others[0].cached == 0
    assert len(others[0].echo) == len(echoed.prompt)


@pytest.fixture
async def engine_with_prefixes(swarm):
    async with engine_of(swarm, LIMITS) as engine:
        yield engine


async def test_kept_session_that_began_behind_a_prefix_goes_back_into_it(checkpoint, full):
    """The conversation's next turn keeps less than the servers held."""
    kept = replace(LIMITS, conversations=ConversationLimits(shared_min=4))
    with inprocess(checkpoint, "0:3", "3:6") as swarm:
        async with engine_of(swarm, kept) as engine:
            await run(engine, asked(2))
            await engine.conversations.close()
            assert (await run(engine, asked(3)))[1][0] == Started(HELD)
            edited = replace(asked(3), prompt=(*SYSTEM[:20], *ids_of(9, seed=11)))
            tokens, others = await run(engine, edited)
            assert others[0] == Started(20)
            (session,) = engine.swarm.sessions.open_sessions
            await asyncio.to_thread(crash, swarm, session.route[0].peer_id)
            await asyncio.to_thread(swarm.serve, "0:3")
            longer = replace(edited, prompt=(*edited.prompt, *tokens, 7, 8))
            assert (await run(engine, longer))[0] == local(full, longer.prompt, 6)
    assert tokens == local(full, edited.prompt, 6)
