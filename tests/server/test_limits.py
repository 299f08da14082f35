"""What one peer may take of a server, and that all accounts come back to zero."""

import asyncio
import contextlib

import pytest
import torch

from swarm.activations import Activations
from swarm.errors import ChannelClosed
from swarm.net.channel import Channel
from swarm.net.limits import ReadLimits
from swarm.protocol.messages import Close, Failed, Refused, Reroute
from swarm.protocol.tensors import is_finite
from swarm.server import accounts as accounts_module
from swarm.server import handler as handler_module
from swarm.server.accounts import BYTES_BURST, BYTES_PER_S, OPENINGS_BURST, STEPS_BURST, Accounts
from swarm.server.pool import NoRoom, Pool
from swarm.server.session import Declined
from tests.server.test_handler import (
    FIRST,
    Peer,
    activations,
    code,
    first,
    held_up,
    loaded,
    open_for,
    opened,
    opened_ring,
    owner,
    rebuild,
    second,
    serving,
    span_output,
    step,
    stranger,
    until,
)

__all__ = ["first", "loaded", "owner", "second", "stranger"]  # fixtures


BYTES_PER_TOKEN = 4 * 64


class Clock:
    """Stands still until told."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


# Accounts


def refusal(charge):
    with pytest.raises(Declined) as caught:
        charge()
    assert caught.value.code == "busy"
    assert caught.value.retry_after_s > 0
    return caught.value


def test_who_takes_too_many_steps_or_bytes_is_told_what_the_limit_is_and_when_to_come_back():
    clock = Clock()
    accounts = Accounts(clock)
    for _ in range(int(STEPS_BURST)):
        accounts.charge_activations("a", 1)
    declined = refusal(lambda: accounts.charge_activations("a", 1))
    assert "2000 steps a second" in declined.why
    clock.now += declined.retry_after_s
    accounts.charge_activations("a", int(10 * BYTES_PER_S))
    declined = refusal(lambda: accounts.charge_activations("a", 1))
    assert "128 MiB of activations a second" in declined.why
    clock.now += declined.retry_after_s
    accounts.charge_activations("a", 1)


def test_a_past_is_taken_on_credit_but_not_on_any():
    clock = Clock()
    accounts = Accounts(clock)
    accounts.charge_activations("a", int(BYTES_BURST))
    assert accounts.debt_s("a") == 0
    accounts.lend_activations("a", int(BYTES_PER_S / 4))
    assert accounts.debt_s("a") == 0.25
    accounts.lend_activations("a", int(BYTES_PER_S / 2))
    declined = refusal(lambda: accounts.lend_activations("a", 1))
    clock.now += declined.retry_after_s
    assert accounts.debt_s("a") == 0
    accounts.lend_activations("a", 1)


def test_one_peers_account_is_not_anothers():
    accounts = Accounts(Clock())
    for _ in range(int(OPENINGS_BURST)):
        accounts.charge_opening("a")
    refusal(lambda: accounts.charge_opening("a"))
    accounts.charge_opening("b")


def test_a_crowd_opens_no_more_than_all_peers_may():
    accounts = Accounts(Clock())
    for number in range(int(accounts_module.ALL_OPENINGS_BURST)):
        accounts.charge_opening(str(number))
    assert "by all peers" in refusal(lambda: accounts.charge_opening("one more")).why


def test_settled_accounts_are_forgotten_and_others_are_not():
    clock = Clock()
    accounts = Accounts(clock)
    accounts.charge_opening("a")
    accounts.sweep()
    assert len(accounts) == 1
    clock.now += 60.0
    accounts.sweep()
    assert len(accounts) == 0


async def test_an_opened_session_has_no_cache_before_its_first_step(first, owner):
    request = await opened(owner, first)
    session = first.server.handler.sessions[request.session]
    assert session._past is None
    (await owner.to(first)).send(*step(request, 1, activations(1, 3)))
    await owner.output()
    assert session.past.cache.length == 3


# The pool


def held(pool, peer):
    """Take all that a peer gets."""
    lease = pool.lease(peer)
    with pytest.raises(NoRoom):
        lease.resize(pool.free(peer) + 1)
    lease.resize(pool.free(peer))
    return lease.amount


def test_a_peer_that_is_alone_gets_eight_ninths_of_the_pool():
    assert held(Pool(900), "a") == 800


def test_who_comes_next_gets_eight_ninths_of_what_is_left():
    pool = Pool(8100)
    assert [held(pool, "a"), held(pool, "b"), held(pool, "c")] == [7200, 800, 88]


def test_a_second_session_of_the_same_peer_gets_no_share_of_its_own():
    pool = Pool(900)
    held(pool, "a")
    assert pool.free("a") == 0
    assert pool.free() > 0


# Through a server


async def test_steps_are_charged_to_the_sessions_owner_and_not_to_the_hop_that_hands_them_on(first, second, owner):
    request = await opened_ring(owner, first, second)
    (await owner.to(first)).send(*step(request, 1, activations(1, 3)))
    await owner.output()
    assert set(second.server.handler.accounts._accounts) == {owner.peer}


async def test_an_owner_that_takes_too_much_is_refused_a_step_which_it_may_send_again(first, owner):
    request = await opened(owner, first)
    account = first.server.handler.accounts._of(owner.peer)
    account.bytes.take(asyncio.get_running_loop().time(), 530 * 2**20)
    message = step(request, 1, activations(1, 2))
    refused = await owner.ask(first, *message)
    assert code(refused) == "busy"
    assert 0 < refused.retry_after_ms < 1000
    await asyncio.sleep(refused.retry_after_ms / 1000)
    (await owner.to(first)).send(*message)
    await owner.output()


async def test_a_peers_sessions_shrink_what_it_may_open_and_leave_room_for_others(first, owner, stranger, monkeypatch):
    monkeypatch.setattr(handler_module, "SESSIONS_MAX", 64)
    for _ in range(3):
        await opened(owner, first)
    refused = await owner.ask(first, open_for(first))
    assert code(refused) == "no_room"
    assert refused.retry_after_ms > 0
    await opened(stranger, first)


async def test_what_waits_to_be_computed_has_a_limit_of_which_a_peer_gets_a_share(first, owner, stranger):
    first.server.handler.inputs.capacity = 9 * 10 * BYTES_PER_TOKEN
    request, theirs = await opened(owner, first), await opened(stranger, first)
    release = held_up(first)
    channel, hidden = await owner.to(first), activations(1, 10)
    for number in range(1, 8):
        channel.send(*step(request, number, hidden))
    channel.send(*step(request, 8, activations(1, 11)))
    assert code(await owner.next()) == "busy"
    (await stranger.to(first)).send(*step(theirs, 1, hidden))
    release.set()
    await stranger.output()
    for _ in range(7):
        await owner.output()
    assert first.server.handler.inputs.used == 0
    channel.send(*step(request, 8, activations(1, 11)))
    await owner.output()


async def test_a_session_that_ends_holds_its_inputs_until_they_are_computed_or_dropped(first, owner):
    request = await opened(owner, first)
    release = held_up(first)
    channel = await owner.to(first)
    channel.send(*step(request, 1, activations(1, 10)))
    channel.send(Close(session=request.session))
    await until(lambda: not first.server.handler.sessions)
    assert first.server.handler.inputs.used == 10 * BYTES_PER_TOKEN
    release.set()
    await until(lambda: first.idle)


async def test_a_reset_session_keeps_no_outputs(first, owner):
    request = await opened(owner, first)
    (await owner.to(first)).send(*step(request, 1, activations(1, 1)))
    await owner.output()
    assert first.server.handler.outputs.used == BYTES_PER_TOKEN
    await owner.ask(first, Reroute(session=request.session, epoch=1, reset=True, after_step=1))
    assert first.server.handler.outputs.used == 0


async def test_outputs_that_are_too_much_to_keep_cost_the_session_its_hop_when_a_step_comes_again(first, owner):
    request = await opened(owner, first)
    first.server.handler.outputs.capacity = 3 * BYTES_PER_TOKEN  # a peer alone gets eight ninths: two of them
    channel = await owner.to(first)
    steps = [step(request, number, activations(1, 1, seed=number), keep=number - 1) for number in (1, 2, 3)]
    outputs = []
    for each in steps:
        channel.send(*each)
        outputs.append(await owner.output())
    channel.send(*steps[1])
    assert torch.equal(await owner.output(), outputs[1])
    channel.send(*steps[0])
    failed = await owner.next()
    assert isinstance(failed, Failed)
    assert (failed.blame, failed.step) == ("self", 1)
    await until(lambda: first.idle)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
async def test_activations_that_are_not_finite_are_refused_unapplied(loaded, first, owner, bad):
    request = await opened(owner, first)
    hidden = activations(1, 3)
    spoilt = hidden.clone()
    spoilt[0, 1, 7] = bad
    refused = await owner.ask(first, *step(request, 1, spoilt))
    assert code(refused) == "bad_activations"
    assert first.server.pool.used == 0
    (await owner.to(first)).send(*step(request, 1, hidden, want=3))
    assert torch.equal(await owner.output(), span_output(loaded, FIRST, hidden))


async def test_a_past_that_is_not_finite_is_refused(first, owner):
    request = await opened(owner, first, after_step=1, rebuild=True)
    piece = torch.full((1, 3, 64), float("nan"))
    assert code(await owner.ask(first, rebuild(request, 0, 3, piece), Activations(piece))) == "bad_activations"


async def test_where_our_own_blocks_overflow_the_session_ends_and_the_next_hop_never_sees_it(first, second, owner):
    request = await opened_ring(owner, first, second)
    submit = first.server._executor.submit
    first.server._executor.submit = lambda job, done: submit(lambda: job() * float("inf"), done)  # the blocks overflow
    refused = await owner.ask(first, *step(request, 1, activations(1, 3)))
    assert isinstance(refused, Refused), refused
    assert refused.code == "bad_request"
    assert "blocks 0:3" in refused.why
    assert first.idle
    assert second.server.handler.accounts._of(owner.peer).steps.is_full(asyncio.get_running_loop().time())


def test_a_sum_that_overflows_is_no_infinite_element():
    assert is_finite(torch.full((1, 2, 64), 3e38))
    assert is_finite(torch.full((4096,), 60000.0, dtype=torch.float16))
    assert is_finite(torch.empty(1, 0, 64))
    assert not is_finite(torch.tensor([float("inf"), float("-inf")]))


async def test_who_does_not_read_gets_no_more_outputs(first, owner, monkeypatch):
    request = await opened(owner, first)
    await owner.settled(first)
    session = first.server.handler.sessions[request.session]
    assert session.owner in first.server._listener.admission.channels
    monkeypatch.setattr(Channel, "unsent_bytes", property(lambda _: handler_module.UNREAD_BYTES_MAX + 1))
    refused = await owner.ask(first, *step(request, 1, activations(1, 2)))
    assert code(refused) == "busy"
    assert "not read" in refused.why
    assert first.computed == []


async def test_a_pusher_into_anothers_session_is_read_ever_less_and_the_owner_is_not(first, owner, stranger):
    request = await opened(owner, first)
    pushed = 4 * int(ReadLimits().idle_burst + ReadLimits().all_idle_burst)
    channel = await stranger.to(first)
    for _ in range(pushed):
        channel.send(*step(request, 1, activations(1, 1)))
    for number in range(1, 21):
        (await owner.to(first)).send(*step(request, number, activations(1, 1), keep=number - 1))
        await owner.output()
    assert stranger.inbox.qsize() < pushed  # its frames still wait while the owner has been served


async def test_after_hostile_peers_have_gone_every_account_is_at_zero(loaded, owner, monkeypatch):
    """Hoarders, replayers, pushers, malformed frames and readers of nothing at once; an honest owner in the middle."""
    async with serving(loaded, FIRST) as site:
        request = await opened(owner, site)
        carriers = []
        for number, peer in enumerate(Peer() for _ in range(12)):
            with contextlib.suppress(ChannelClosed):
                carriers.append(carrier := await peer.carrier_to(site))
                channel = carrier.channel
                mine = [open_for(site) for _ in range(10)]
                for each in mine:
                    channel.send(each)
                    channel.send(*step(each, 1, activations(1, 16), want=16))
                    channel.send(*step(each, 1, activations(1, 16), want=16))
                    channel.send(*step(request, 1, activations(1, 4)))
                if number % 3 == 0:
                    carrier.write((1 << 20).to_bytes(4, "big") + bytes(1000))
                if number % 3 == 1:
                    carrier.write(bytes(64))
                if number % 3 == 2:
                    carrier.pause_reading()
        (await owner.to(site)).send(*step(request, 1, activations(1, 4)))
        while isinstance(answer := await owner.next(), Refused | Failed):
            assert getattr(answer, "code", "") in {"busy", "no_room"}, answer
            await asyncio.sleep(answer.retry_after_ms / 1000)
            (await owner.to(site)).send(*step(request, 1, activations(1, 4)))
        for carrier in carriers:
            carrier.abort()
        (await owner.to(site)).send(Close(session=request.session))
        await owner.settled(site)
        owner.leave()
        handler, listener = site.server.handler, site.server._listener
        await until(lambda: site.idle and not listener.admission.channels and handler.steps_under_way == 0)
        for pool in (site.server.pool, handler.inputs, handler.outputs, handler.journals):
            assert not pool.held
        assert not listener.admission.proven
        assert not listener.admission.unproven
        assert listener.flow.buffers.total == 0
        later = asyncio.get_running_loop().time() + 3600
        monkeypatch.setattr(handler.accounts, "_clock", lambda: later)
        handler.accounts.sweep()
        assert len(handler.accounts) == 0
