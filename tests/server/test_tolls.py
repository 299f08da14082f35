"""Who pays for a message, and how much."""

import asyncio
from types import SimpleNamespace

import pytest

from swarm.activations import Activations
from swarm.net.gate import IDLE, PROGRESS, Toll
from swarm.net.limits import ReadLimits
from swarm.protocol.messages import Replay, Step
from tests.server.sites import POOL_TOKENS, WINDOW, Peer, Site, activations, code, opened, opened_ring, rebuilt, step


async def test_steps_refused_in_turns_are_not_free(first: Site, owner: Peer):
    """Steps that were on their way behind a refused one are free once each, not for ever."""
    request = await opened(owner, first)
    session, take = first.session(request), first.server.handler.on_message
    first.tighten(unread_bytes_max=-1, retry_after_s=0.5)
    idle = [
        take(session.owner, *step(request, number, activations(1, 1))).idle for _ in range(20) for number in (1, 2, 3)
    ]
    assert idle == [False] * 3 + [True] * 57
    await asyncio.sleep(0.25)  # half of the time that the sender was told
    assert not take(session.owner, *step(request, 1, activations(1, 1))).idle


async def test_only_accepted_decode_steps_are_not_counted_as_bytes(first: Site, owner: Peer):
    request = await opened(owner, first)
    session, take, one = first.session(request), first.server.handler.on_message, activations(1, 1)
    assert take(session.owner, *step(request, 1, activations(1, 4))) == PROGRESS
    await owner.output()
    assert take(session.owner, *step(request, 2, one, keep=4)) == Toll(free_bytes=one.nbytes)
    await owner.output()
    refused = take(session.owner, *step(request, 3, activations(2, 1), keep=5))
    assert (refused.idle, refused.free_bytes, refused.payer) == (True, 0, session.owner)


@pytest.mark.real_time
async def test_steps_without_room_are_free_unless_sent_again_at_once(first: Site, owner: Peer, stranger: Peer):
    holder = await opened(stranger, first)
    (await stranger.to(first)).send(*step(holder, 1, activations(1, 2)))
    await stranger.output()
    request = await opened(owner, first, positions_max=POOL_TOKENS)
    session, tokens = first.session(request), first.server.pool.free(owner.peer) + 1
    first.tighten(retry_after_s=0.5)

    async def sent(message: Step, hidden: Activations) -> tuple[bool, str]:
        toll = first.server.handler.on_message(session.owner, message, hidden)
        return toll.idle, code(await owner.next())

    first_step = step(request, 1, activations(1, tokens))
    behind = [step(request, number, activations(1, 1), keep=tokens) for number in range(2, 1 + WINDOW)]
    assert await sent(*first_step) == (False, "no_room")
    assert [await sent(*each) for each in behind] == [(False, "out_of_order")] * (WINDOW - 1)  # they were on their way
    assert await sent(*behind[0]) == (True, "out_of_order")  # once is enough
    assert await sent(*first_step) == (True, "no_room")  # it was asked to wait
    await asyncio.sleep(0.5)
    assert await sent(*first_step) == (False, "no_room")


async def test_a_hop_pays_for_an_owner_that_is_not_read(first: Site, owner: Peer, stranger: Peer):
    """Else two peers that know each other send as much as they like, the one in the other's name."""
    request = await opened(owner, first, previous=stranger.peer)
    (await stranger.to(first)).send(*step(request, 1, activations(1, 1)))
    await owner.output()
    session, take = first.session(request), first.server.handler.on_message
    sender, real = session.peers.source, session.owner
    again = step(request, 1, activations(1, 1))
    assert take(sender, *again) == Toll(idle=True, payer=real)
    session.peers.owner = SimpleNamespace(peer=real.peer, is_paused=True, unsent_bytes=0, send=real.send)
    assert take(sender, *again) == Toll(idle=True, payer=sender)
    session.peers.owner = real


async def test_a_confirmation_that_is_no_news_is_idle(first: Site, owner: Peer):
    request = await opened(owner, first, relay=True)
    channel, take = await owner.to(first), first.server.handler.on_message
    channel.send(*step(request, 1, activations(1, 4)))
    await owner.next()
    channel.send(Replay(session=request.session, epoch=0, step=1, hops=1))
    await owner.next()
    tolls = [take(first.session(request).owner, rebuilt(request, stop), None) for stop in (3, 4, 4)]
    assert tolls == [IDLE, PROGRESS, IDLE]


async def test_steps_that_a_hop_passes_on_charge_the_owner(first, second, owner):
    request = await opened_ring(owner, first, second)
    (await owner.to(first)).send(*step(request, 1, activations(1, 3)))
    await owner.output()
    assert set(second.server.handler.accounts.peers) == {owner.peer}


async def test_an_owner_that_takes_too_much_is_refused_a_step_which_it_may_send_again(first, owner):
    request = await opened(owner, first)
    account = first.server.handler.accounts.of(owner.peer)
    account.bytes.take(asyncio.get_running_loop().time(), 530 * 2**20)
    message = step(request, 1, activations(1, 2))
    refused = await owner.ask(first, *message)
    assert code(refused) == "busy"
    assert 0 < refused.retry_after_ms < 1000
    await asyncio.sleep(refused.retry_after_ms / 1000)
    (await owner.to(first)).send(*message)
    await owner.output()


async def test_a_peer_that_pushes_into_anothers_session_is_throttled(first, owner, stranger):
    request = await opened(owner, first)
    pushed = 4 * int(ReadLimits().idle_burst + ReadLimits().all_idle_burst)
    channel = await stranger.to(first)
    for _ in range(pushed):
        channel.send(*step(request, 1, activations(1, 1)))
    for number in range(1, 21):
        (await owner.to(first)).send(*step(request, number, activations(1, 1), keep=number - 1))
        await owner.output()
    assert stranger.inbox.qsize() < pushed  # its frames still wait while the owner has been served
