"""A relayed channel goes on over a direct connection, over real sockets; and claims that nobody may make."""

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from swarm.errors import Unreachable
from swarm.net.carriers.movable import MovableCarrier
from swarm.net.carriers.tcp import dial
from swarm.net.channel import Channel, ignore
from swarm.net.gate import IDLE, PROGRESS
from swarm.net.greeting import Proven
from swarm.net.transfer import MoveSecrets
from swarm.net.traversal import Traversal
from swarm.net.upgrades import UpgradeLimits, Upgrades, admit
from swarm.protocol.meeting import Claim
from swarm.protocol.messages import Close, Inquiry
from tests.net.places import Place, Places, limits, places
from tests.net.support import SESSION, endpoint, remote, until

pytestmark = pytest.mark.real_time

SOON = UpgradeLimits(first_s=0.2, most_s=0.3)
NEVER = UpgradeLimits(tries_max=0)


@dataclass
class Relayed:
    """A relayed channel, and what either end has heard."""

    made: Places
    anchor: Place
    hidden: Place
    caller: Place
    channel: Channel
    heard: list = field(default_factory=list)

    @property
    def taken(self) -> Channel:
        """The hidden peer's end."""
        accepted = self.hidden.ways.listener.admission.proven[self.caller.me.identity.peer_id]
        return next(iter(accepted))

    @property
    def ways(self) -> tuple[str, str]:
        return self.channel.carrier.way, self.taken.carrier.way

    async def works(self) -> bool:
        async with asyncio.timeout(30):
            return await self.channel.ping() > 0 and await self.taken.ping() > 0

    async def fresh(self, me=None, on_message=ignore) -> Channel:
        """A direct channel to the hidden peer, which others can dial here."""
        me = me or self.caller.me
        return await dial(self.hidden.ways.listener.address, remote(self.hidden.me), me, on_message)

    def secrets(self, fresh: Channel) -> MoveSecrets:
        return MoveSecrets(self.channel.ready.result().exporter, fresh.ready.result().exporter)

    def claim(self, fresh: Channel) -> Claim:
        name = MoveSecrets.name(self.channel.ready.result().exporter)
        return Claim(channel=name, proof=self.secrets(fresh).proof(first=True))


@contextlib.asynccontextmanager
async def relayed(upgrades: UpgradeLimits = NEVER):
    """Nobody can dial the caller yet, and no punch succeeds."""
    async with places() as made:
        bounds = limits(punch=False, upgrades=upgrades)
        anchor = await made.place()
        hidden, caller = await made.hidden(anchor, bounds=bounds), await made.place(bounds)
        heard = []

        def hear(_, message, __):
            heard.append(message)
            return PROGRESS

        channel = await caller.ways.dial(anchor.via, remote(hidden.me), caller.me, hear)
        assert channel.carrier.way == "relayed"
        await channel.ping()
        yield Relayed(made, anchor, hidden, caller, channel, heard)


async def test_a_relayed_channel_moves_and_loses_nothing():
    async with relayed(SOON) as pair:
        anchor, taken = pair.anchor.ways.anchor, pair.taken
        sent = 0

        async def talk(until_s: float) -> None:
            nonlocal sent
            end = asyncio.get_running_loop().time() + until_s
            while asyncio.get_running_loop().time() < end:
                for end_of in (pair.channel, taken):
                    end_of.send(Inquiry(session=SESSION, epoch=sent))
                sent += 1
                await asyncio.sleep(0)

        await talk(0.1)
        pair.caller.ways.caller.port = pair.caller.ways.listener.address.port  # others can dial it now
        talking = asyncio.create_task(talk(1.5))
        await until(lambda: pair.ways == ("reverse", "reverse"))
        await until(lambda: anchor.load.pairs == 0)
        relayed_bytes = anchor.load.relayed_bytes
        await talking
        assert pair.taken is taken
        assert await pair.works()
        assert [message.epoch for _, message in pair.hidden.taken] == list(range(sent))
        assert [message.epoch for message in pair.heard] == list(range(sent))
        assert anchor.load.relayed_bytes == relayed_bytes
        assert len(pair.hidden.ways.listener.admission.channels) == 1


async def test_a_later_punch_replaces_the_relay():
    async with relayed() as pair:
        hidden, me = await pair.made.hidden(pair.anchor), pair.caller.me
        able = Traversal(me, limits=limits())  # as the caller, and its punches succeed
        pair.made.made.append(able)
        channel = await pair.caller.ways.dial(pair.anchor.via, remote(hidden.me), me, ignore)
        assert channel.carrier.way == "relayed"
        upgrades = Upgrades(able.caller, SOON)
        upgrades.watch(channel, pair.anchor.via, remote(hidden.me))
        await until(lambda: channel.carrier.way == "punched")
        assert await channel.ping() > 0
        await upgrades.close()
        channel.close()
        await channel.ended


async def test_a_channel_stays_relayed_where_every_try_fails():
    async with relayed(UpgradeLimits(first_s=0.02, most_s=0.02, tries_max=3)) as pair:
        calls = pair.anchor.ways.anchor.load.calls
        await until(lambda: pair.anchor.ways.anchor.load.calls >= calls + 3)
        assert await pair.works()
        assert pair.ways == ("relayed", "relayed")
        await asyncio.sleep(0.2)
        assert pair.anchor.ways.anchor.load.calls == calls + 3


@pytest.mark.parametrize("moves", [True, False])
async def test_a_peer_of_a_former_version_is_not_asked(moves):
    """It would take the claim for garbage. Its Hello does not say that it knows it."""
    asked, loop = asyncio.Event(), asyncio.get_running_loop()

    class Caller:
        async def call(self, *_, **__):
            asked.set()
            raise Unreachable("the peer", (), 0.0)

    ready = loop.create_future()
    ready.set_result(Proven("the peer", b"k" * 32, "0.1.0", moves=moves))
    carrier = MovableCarrier(lambda carrier: None, "relayed")
    upgrades = Upgrades(Caller(), UpgradeLimits(first_s=0.0, tries_max=1))
    channel = SimpleNamespace(carrier=carrier, ready=ready, ended=loop.create_future(), closed=False)
    upgrades.watch(channel, None, SimpleNamespace(peer="the peer"))
    await asyncio.sleep(0.05)
    assert asked.is_set() == moves
    await upgrades.close()


def test_waits_grow_and_are_bounded():
    def waits_s(jitter: float) -> list[float]:
        return list(UpgradeLimits(first_s=4, most_s=20, jitter=jitter, tries_max=5).waits_s(random.Random(7)))

    assert waits_s(0.0) == [4, 8, 16, 20, 20]
    assert all(0.5 <= wait / plain <= 1.5 for wait, plain in zip(waits_s(0.5), waits_s(0.0), strict=True))
    assert waits_s(0.5) != waits_s(0.0)


# Claims that fail


async def test_a_stranger_claims_nothing_and_is_charged():
    async with relayed() as pair:
        stranger, admission = endpoint(), pair.hidden.ways.listener.admission
        fresh = await pair.fresh(stranger)
        await until(lambda: stranger.identity.peer_id in admission.proven)
        (theirs,) = admission.proven[stranger.identity.peer_id]
        assert admit(admission, theirs, pair.claim(fresh)) == IDLE
        await until(lambda: fresh.closed)
        assert pair.ways == ("relayed", "relayed")
        assert await pair.works()


@pytest.mark.parametrize("wrong", ["proof", "channel", "reflected"])
async def test_a_peers_wrong_claim_ends_the_connection_that_brings_it(wrong):
    async with relayed() as pair:
        fresh = await pair.fresh()
        claim = pair.claim(fresh)
        other = pair.secrets(fresh).proof(first=False) if wrong == "reflected" else "0" * 64
        fresh.send(claim.model_copy(update={"channel" if wrong == "channel" else "proof": other}))
        await until(lambda: fresh.closed)
        assert pair.ways == ("relayed", "relayed")
        assert await pair.works()


async def test_a_claim_for_another_connection_is_worth_nothing():
    async with relayed() as pair:
        one, other = await pair.fresh(), await pair.fresh()
        other.send(pair.claim(one))
        await until(lambda: other.closed)
        assert await pair.works()


async def test_another_process_of_the_same_peer_claims_nothing():
    async with relayed() as pair:
        fresh = await pair.fresh(endpoint(pair.caller.me.identity))
        fresh.send(pair.claim(fresh))
        await until(lambda: fresh.closed)
        assert await pair.works()


async def test_a_direct_channel_is_not_claimed():
    async with relayed() as pair:
        old, fresh = await pair.fresh(), await pair.fresh()
        exporter = old.ready.result().exporter
        secrets = MoveSecrets(exporter, fresh.ready.result().exporter)
        fresh.send(Claim(channel=MoveSecrets.name(exporter), proof=secrets.proof(first=True)))
        await until(lambda: fresh.closed)
        assert await old.ping() > 0


async def test_the_channel_stays_where_the_new_connection_dies_first():
    async with relayed() as pair:
        claimed = asyncio.Event()
        fresh = await pair.fresh(on_message=lambda *_: claimed.set() or PROGRESS)
        fresh.send(pair.claim(fresh))
        await claimed.wait()
        assert await pair.works()  # while it waits for the caller to move
        fresh.cut_off("the network fails")
        await until(lambda: pair.taken.carrier.can_move)
        assert await pair.works()
        assert pair.ways == ("relayed", "relayed")


async def test_the_channel_moves_after_a_move_that_was_given_up():
    async with relayed() as pair:
        claimed = asyncio.Event()
        given_up = await pair.fresh(on_message=lambda *_: claimed.set() or PROGRESS)
        given_up.send(pair.claim(given_up))
        await claimed.wait()
        assert await pair.works()  # bytes come by the old connection meanwhile
        given_up.close()
        await until(lambda: pair.taken.carrier.can_move)

        def move(fresh, *_):
            pair.channel.carrier.move(fresh.carrier, pair.secrets(fresh), first=True)
            return PROGRESS

        fresh = await pair.fresh(on_message=move)
        fresh.send(pair.claim(fresh))
        await until(lambda: pair.ways == ("direct", "direct") or pair.channel.closed)
        assert await pair.works()


async def test_the_channel_stays_where_garbage_comes_by_the_new_connection():
    async with relayed() as pair:
        claimed = asyncio.Event()
        fresh = await pair.fresh(on_message=lambda *_: claimed.set() or PROGRESS)
        fresh.send(pair.claim(fresh))
        await claimed.wait()
        fresh.send(Close(session=SESSION))
        await until(lambda: fresh.closed)
        assert await pair.works()
        assert pair.ways == ("relayed", "relayed")


async def test_the_channel_ends_where_its_connections_die_in_the_move():
    async with relayed() as pair:
        moved = asyncio.Event()
        secrets = None

        def move(fresh, *_):
            pair.channel.carrier.move(fresh.carrier, secrets, first=True)
            pair.channel.carrier.abort()
            moved.set()
            return PROGRESS

        fresh = await pair.fresh(on_message=move)
        secrets, taken = pair.secrets(fresh), pair.taken
        fresh.send(pair.claim(fresh))
        await moved.wait()
        await until(lambda: pair.channel.closed and taken.closed)
