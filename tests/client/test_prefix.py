"""A session that begins behind a prompt's kept beginning gives the same outputs, whatever happens to its hops."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from itertools import product

import pytest
import torch

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.planning.router import Wanted
from swarm.client.session.membership import joined
from swarm.client.session.plan import SessionPlan
from swarm.identity import Identity
from swarm.model.loading import load_ends
from swarm.model.tokens import TokenEnds
from swarm.protocol.journal import Expansion
from swarm.protocol.marks import MarkLimits, Prefix
from swarm.server.prefixes import Prefixes
from tests.support.inprocess import NETWORK, inprocess
from tests.support.often import rest_is_long

BLOCK = 16
IDS = tuple(torch.randint(3, 120, (45,), generator=torch.Generator().manual_seed(5)).tolist())
NEXT = (7, 8, 9)
LONGEST = 32  # of whole blocks before the last token


class Opener:
    """Opens sessions of one owner on a swarm in this process."""

    def __init__(self, swarm, membership, ends):
        self.swarm, self.membership, self.ends = swarm, membership, ends

    async def open(self, secret=b"s" * 32, ids=IDS):
        """A session; without a secret, one that asks for nothing."""
        prefix = None if secret is None else Prefix(secret, ids, MarkLimits(block_positions=BLOCK))
        plan = SessionPlan(
            root=self.swarm.checkpoint.root,
            positions_max=64,
            rollback_max=0,
            step_timeout_s=20.0,
            wait_for_blocks_s=0.0,
            positions_soon=64,
            expansion=Expansion(lambda ids, start: self.ends.embed(ids[:, :, 0], start), self.ends.position_bytes),
            prefix=prefix,
        )
        return await self.membership.open(Blocks(0, 6), plan)

    async def step(self, session, ids):
        embedded = self.ends.embed(torch.tensor([ids]), session.length)
        return await session.step(Activations(embedded), want=1, ids=torch.tensor([ids], dtype=torch.int32))

    async def outputs(self, session, between=lambda: None):
        """The last output of the prompt, and those of some tokens behind it."""
        outputs = [await self.step(session, IDS[session.length :])]
        for token in NEXT:
            await asyncio.to_thread(between)
            outputs.append(await self.step(session, (token,)))
        return torch.cat(outputs, dim=1)

    async def kept(self):
        """Have the servers keep the prompt. Returns the outputs that all others should give."""
        session = await self.open()
        outputs = await self.outputs(session)
        await session.close()
        return outputs


@asynccontextmanager
async def opener(swarm):
    @asynccontextmanager
    async def join():
        yield swarm.directory()

    checkpoint = swarm.checkpoint
    ends = TokenEnds(load_ends(checkpoint, dtype=swarm.dtype), checkpoint.traits)
    wanted = Wanted(checkpoint.root, checkpoint.public_name, checkpoint.n_blocks, "float32")
    async with joined(join, Identity.generate(), network=NETWORK) as member, member.of(wanted) as membership:
        yield Opener(swarm, membership, ends)


def hosting(swarm, hop):
    return next(server for server in swarm.servers if server.me.identity.peer_id == hop.peer_id)


async def told(swarm, work):
    """Do something in the servers' loop."""

    async def run():
        work()

    await asyncio.to_thread(swarm.loop.run, run())


def prefixes(server):
    return server.handler.admission.prefixes


def same(got, expected):
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.long
async def test_next_session_of_the_owner_begins_behind_the_prompt(checkpoint):
    with inprocess(checkpoint, "0:2", "2:4", "4:6") as swarm:
        async with opener(swarm) as owner:
            expected = await owner.kept()
            session = await owner.open()
            assert session.length == LONGEST
            same(await owner.outputs(session), expected)


async def test_other_secrets_and_sessions_without_one_begin_with_nothing(checkpoint):
    with inprocess(checkpoint, "0:3", "3:6") as swarm:
        async with opener(swarm) as owner:
            expected = await owner.kept()
            for secret in (b"t" * 32, None):
                session = await owner.open(secret)
                assert session.length == 0
                same(await owner.outputs(session), expected)
            parted = await owner.open(ids=(*IDS[:20], *reversed(IDS[20:])))
            assert parted.length == BLOCK


@pytest.mark.parametrize(("index", "is_early"), rest_is_long(product((0, 1, 2), (False, True)), [(1, False)]))
async def test_hop_that_dies_costs_a_replay_of_the_whole_past(checkpoint, index, is_early):
    """Before the first step, or behind it. The other hops have no outputs of what they began with to replay."""
    with inprocess(checkpoint, "0:2", "2:4", "4:6") as swarm:
        async with opener(swarm) as owner:
            expected = await owner.kept()
            session = await owner.open()
            assert session.length == LONGEST
            spare = await asyncio.to_thread(swarm.serve, str(session.route[index].blocks))
            dying, done = hosting(swarm, session.route[index]), []
            others = {
                server: server.handler.sessions[session.id] for server in swarm.servers[:3] if server is not dying
            }

            def kill():
                if not done:
                    done.append(swarm.crash(dying))

            if is_early:
                await asyncio.to_thread(kill)
            same(await owner.outputs(session, kill), expected)
            assert session.route[index].peer_id == spare.me.identity.peer_id
            assert all(server.handler.sessions[session.id] is kept for server, kept in others.items())


async def test_least_of_all_hops_is_what_the_session_begins_with(checkpoint):
    with inprocess(checkpoint, "0:3", "3:6") as swarm:
        async with opener(swarm) as owner:
            expected = await owner.kept()
            for server, tokens, length in ((1, BLOCK, BLOCK), (0, 0, 0)):
                await told(swarm, partial(prefixes(swarm.servers[server]).trim, tokens))
                session = await owner.open()
                assert session.length == length
                same(await owner.outputs(session), expected)
                await session.close()


async def test_blocks_may_be_dropped_between_the_opening_and_the_first_step(checkpoint):
    with inprocess(checkpoint, "0:3", "3:6") as swarm:
        async with opener(swarm) as owner:
            expected = await owner.kept()
            session = await owner.open()
            for server in swarm.servers:
                await told(swarm, partial(prefixes(server).trim, 0))
            assert session.length == LONGEST
            same(await owner.outputs(session), expected)


class Liar(Prefixes):
    """Says that it holds more than it does."""

    def __init__(self, server, positions):
        super().__init__(server.memory, server.options.limits.handler.prefixes)
        self.positions = positions

    def begin(self, session, request, now):
        super().begin(session, request, now)
        return self.positions


@pytest.mark.parametrize("positions", rest_is_long([LONGEST, 40, 4000], [40]))
async def test_hop_that_holds_less_than_it_says_is_replaced(checkpoint, positions):
    """It refuses the first step, or gives wrong outputs as it could without. The text is another server's."""
    with inprocess(checkpoint, "0:3", "3:6") as swarm:
        async with opener(swarm) as owner:
            expected = await owner.kept()
            liar = swarm.servers[1]
            liar.handler.admission.prefixes = Liar(liar, positions)
            session = await owner.open()
            assert session.length == LONGEST
            spare = await asyncio.to_thread(swarm.serve, "3:6")
            await owner.membership.router.surveys.read()
            same(await owner.outputs(session), expected)
            assert session.route[1].peer_id == spare.me.identity.peer_id


async def test_past_of_one_route_is_not_used_behind_another_hop(checkpoint):
    """The hop before may have computed wrongly: what came of it is used behind this very hop alone."""
    with inprocess(checkpoint, "0:3", "3:6") as swarm:
        async with opener(swarm) as owner:
            expected = await owner.kept()
            await asyncio.to_thread(swarm.crash, swarm.servers[0])
            await asyncio.to_thread(swarm.serve, "0:3")
            session = await owner.open()
            assert session.length == 0
            assert swarm.servers[1].handler.sessions[session.id].length == 0
            same(await owner.outputs(session), expected)


class Noting(Prefixes):
    """Notes every Open, and refuses to have the first ones answered: their sessions end at once."""

    def __init__(self, server, failing=0):
        super().__init__(server.memory, server.options.limits.handler.prefixes)
        self.server, self.failing, self.opened = server, failing, []

    def begin(self, session, request, now):
        self.opened.append(request)
        if len(self.opened) <= self.failing:
            asyncio.get_running_loop().call_soon(self.server.handler.registry.fail, session, None, "a test")
        return super().begin(session, request, now)


async def test_all_hops_are_asked_anew_when_the_first_attempt_fails(checkpoint):
    async def asked():
        with inprocess(checkpoint, "0:3", "3:6") as swarm:
            async with opener(swarm) as owner:
                noting = [Noting(server, failing) for server, failing in zip(swarm.servers, (0, 2), strict=True)]
                for server, one in zip(swarm.servers, noting, strict=True):
                    server.handler.admission.prefixes = one
                expected = await owner.kept()
                opened = [[request.marks is not None for request in one.opened] for one in noting]
                if opened != [[True] * 3] * 2:
                    return False
                session = await owner.open()
                assert session.length == LONGEST
                same(await owner.outputs(session), expected)
                return True

    for _ in range(8):  # a failure that arrives behind the answer, in a frame of its own, is a repair: nothing is kept
        if await asked():
            return
    pytest.fail("in eight attempts not all hops were asked anew")


async def test_hops_are_asked_with_the_first_opening_only(checkpoint):
    """Later the session has a length, and steps on their way: a kept past would come between."""
    with inprocess(checkpoint, "0:6") as swarm:
        async with opener(swarm) as owner:
            server = swarm.servers[0]
            noting = server.handler.admission.prefixes = Noting(server)
            session = await owner.open()  # it holds nothing
            assert session.length == 0
            expected = await owner.kept()
            for fail_again in (False, True):

                def fail():
                    mine = server.handler.sessions[session.id]
                    server.handler.registry.fail(mine, None, "a test")

                await told(swarm, fail)
                if not fail_again:
                    outputs = [await owner.step(session, IDS)]
                else:
                    outputs += [await owner.step(session, (token,)) for token in NEXT]
            same(torch.cat(outputs, dim=1), expected)
            mine = [request.marks is not None for request in noting.opened if request.session == session.id]
            assert mine == [True, False, False]
