"""Servers keep the beginnings of prompts for their owner: later sessions begin behind them, and get the same tokens."""

from swarm.gateway.conversations import ConversationLimits
from swarm.gateway.engine import EngineLimits
from swarm.gateway.generation import Generation, Started
from swarm.protocol.marks import MarkLimits
from tests.gateway.conftest import engine_of
from tests.gateway.test_engine import GREEDY, ids_of, local, run
from tests.support.inprocess import inprocess

BLOCK = 16
LIMITS = EngineLimits(conversations=ConversationLimits(sessions_max=0), marks=MarkLimits(block_positions=BLOCK))
SYSTEM = ids_of(40, seed=1)


def asked(tail: int, owner: str = "", **fields: object) -> Generation:
    """A generation whose prompt begins with the common 40 tokens."""
    prompt = (*SYSTEM, *ids_of(5, seed=tail))
    return Generation(prompt=prompt, tokens_max=6, sampling=GREEDY, owner=owner, **fields)


async def test_second_session_begins_behind_the_common_blocks(checkpoint, full):
    with inprocess(checkpoint, "0:2", "2:6") as swarm:
        async with engine_of(swarm, LIMITS) as engine:
            for tail, held in ((2, 0), (3, 2 * BLOCK)):
                tokens, others = await run(engine, asked(tail))
                assert others[0] == Started(held)
                assert tokens == local(full, asked(tail).prompt, 6)
