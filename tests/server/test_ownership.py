"""Sessions belong to the peers that opened them, and take activations from their named previous peers only."""

import asyncio

import pytest
import torch

from swarm.protocol.messages import Close, Failed, Opened, Replay, Reroute, Rerouted
from swarm.protocol.naming import new_name
from tests.server.sites import (
    FIRST,
    SECOND,
    TOLERANCE,
    WITHIN_S,
    Loaded,
    Peer,
    Site,
    activations,
    code,
    local,
    open_for,
    opened,
    opened_ring,
    span_output,
    step,
)


async def test_a_step_travels_the_hops_back_to_the_owner(loaded: Loaded, first: Site, second: Site, owner: Peer):
    request = await opened_ring(owner, first, second)
    hidden = activations(1, 5)
    (await owner.to(first)).send(*step(request, 1, hidden, want=2))
    got = await owner.output()
    assert torch.equal(got, local(loaded, hidden)[:, -2:])
    assert owner.inbox.empty()


async def test_a_stranger_can_neither_push_into_a_session_nor_close_nor_open_it_again(
    loaded: Loaded, first: Site, owner: Peer, stranger: Peer
):
    request = await opened(owner, first)
    hidden = activations(1, 4)
    refused = await stranger.ask(first, *step(request, 1, hidden))
    assert code(refused) == "not_yours"
    (await stranger.to(first)).send(Close(session=request.session))
    await stranger.settled(first)
    assert code(await stranger.ask(first, request)) == "not_yours"
    assert code(await stranger.ask(first, request.model_copy(update={"epoch": 7}))) == "not_yours"
    assert list(first.server.handler.sessions) == [request.session]
    (await owner.to(first)).send(*step(request, 1, hidden, want=4))
    assert torch.equal(await owner.output(), span_output(loaded, FIRST, hidden))
    assert first.computed == 1


async def test_whoever_takes_a_sessions_name_gives_way_to_whose_it_is(first: Site, owner: Peer, stranger: Peer):
    """Hops know the name: one could take it at all servers that might replace it, and then vanish."""
    name = new_name(owner.peer)
    squats = await opened(stranger, first, session=name)
    (await stranger.to(first)).send(*step(squats, 1, activations(1, 4)))
    await stranger.output()
    assert isinstance(await owner.ask(first, open_for(first, session=name)), Opened)
    failed = await stranger.next()
    assert isinstance(failed, Failed)
    assert "another peer's" in failed.why
    assert code(await stranger.ask(first, squats.model_copy(update={"epoch": 9}))) == "not_yours"
    (await owner.to(first)).send(*step(squats, 1, activations(1, 4)))
    await owner.output()
    assert first.server.handler.sessions[name].owner.peer == owner.peer


async def test_another_channel_of_the_owners_identity_controls_nothing(first: Site, owner: Peer):
    request = await opened(owner, first)
    again = Peer(owner.me.identity)
    (await again.to(first)).send(Close(session=request.session))
    await again.settled(first)
    assert list(first.server.handler.sessions) == [request.session]
    again.leave()


async def test_activations_count_from_the_named_previous_peer_only(
    loaded: Loaded, second: Site, owner: Peer, stranger: Peer
):
    previous = Peer()
    request = await opened(owner, second, previous=previous.peer, start=3, stop=6)
    hidden = activations(1, 3)
    for other in (owner, stranger):
        assert code(await other.ask(second, *step(request, 1, hidden))) == "not_yours"
    assert second.computed == 0
    (await previous.to(second)).send(*step(request, 1, hidden, want=3))
    assert torch.equal(await owner.output(), span_output(loaded, SECOND, hidden))  # the owner gets what comes out
    assert previous.inbox.empty()
    (await previous.to(second)).send(Close(session=request.session))
    await previous.settled(second)
    assert list(second.server.handler.sessions) == [request.session]  # who sends activations controls nothing
    previous.leave()


async def test_a_step_of_another_epoch_is_rejected(first: Site, owner: Peer):
    request = await opened(owner, first, epoch=5)
    for epoch in (4, 6):
        stale = request.model_copy(update={"epoch": epoch})
        refused = await owner.ask(first, *step(stale, 1, activations(1, 2)))
        assert code(refused) == "not_yours"
        assert "epoch" in refused.why
    assert first.computed == 0
    (await owner.to(first)).send(*step(request, 1, activations(1, 2)))
    await owner.output()


async def test_a_step_for_no_session_says_so(first: Site, stranger: Peer):
    answer = await stranger.ask(first, *step(open_for(first), 1, activations(1, 2)))
    assert isinstance(answer, Failed)
    assert answer.why == "no such session"


async def test_a_stranger_cannot_fail_a_session_by_speaking_as_its_next_hop(
    loaded: Loaded, first: Site, second: Site, owner: Peer, stranger: Peer
):
    request = await opened_ring(owner, first, second)
    lie = Failed(session=request.session, epoch=0, step=1, blame="self", why="a lie")
    (await stranger.to(first)).send(lie)
    await stranger.settled(first)
    hidden = activations(1, 2)
    (await owner.to(first)).send(*step(request, 1, hidden, want=2))
    assert torch.equal(await owner.output(), local(loaded, hidden))


async def test_a_message_that_only_servers_send_ends_the_channel(first: Site, stranger: Peer):
    channel = await stranger.to(first)
    channel.send(Opened(session="0" * 32, epoch=0, window=1))
    async with asyncio.timeout(WITHIN_S):
        await channel.ended


async def test_the_owner_opens_its_session_anew_with_a_later_epoch(first: Site, owner: Peer):
    free = first.server.pool.free()
    request = await opened(owner, first, epoch=3)
    (await owner.to(first)).send(*step(request, 1, activations(1, 4), want=4))
    await owner.output()
    assert first.server.pool.free() < free
    for epoch in (2, 3):
        assert code(await owner.ask(first, request.model_copy(update={"epoch": epoch}))) == "not_yours"
    assert isinstance(await owner.ask(first, request.model_copy(update={"epoch": 4})), Opened)
    assert [session.seat.epoch for session in first.server.handler.sessions.values()] == [4]
    assert first.server.pool.free() == free
    (await owner.to(first)).send(*step(request.model_copy(update={"epoch": 4}), 1, activations(1, 4), want=4))
    await owner.output()


async def test_a_stranger_can_neither_reroute_nor_replay_a_session(
    first: Site, second: Site, owner: Peer, stranger: Peer
):
    request = await opened_ring(owner, first, second)
    reroute = Reroute(session=request.session, epoch=5, previous=stranger.peer)
    assert code(await stranger.ask(first, reroute)) == "not_yours"
    replay = Replay(session=request.session, epoch=request.epoch, step=0, hops=1)
    assert code(await stranger.ask(first, replay)) == "not_yours"
    (await owner.to(first)).send(*step(request, 1, activations(1, 3)))
    await owner.output()  # the session is as it was


@pytest.mark.parametrize("epoch", [0, 1])
async def test_a_reroute_needs_a_later_epoch(first: Site, owner: Peer, epoch: int):
    request = await opened(owner, first, epoch=1)
    assert code(await owner.ask(first, Reroute(session=request.session, epoch=epoch))) == "not_yours"
    assert isinstance(await owner.ask(first, Reroute(session=request.session, epoch=2)), Rerouted)


async def test_after_a_reroute_the_old_epoch_and_the_old_neighbour_are_out(
    loaded: Loaded, first: Site, owner: Peer, stranger: Peer
):
    request = await opened(owner, first, previous=stranger.peer)
    (await stranger.to(first)).send(*step(request, 1, activations(1, 3)))
    await owner.output()
    assert isinstance(await owner.ask(first, Reroute(session=request.session, epoch=1)), Rerouted)
    late, hidden = step(request, 2, activations(1, 1), keep=3)
    assert code(await stranger.ask(first, late, hidden)) == "not_yours"
    assert code(await stranger.ask(first, late.model_copy(update={"epoch": 1}), hidden)) == "not_yours"
    (await owner.to(first)).send(late.model_copy(update={"epoch": 1}), hidden)
    expected = span_output(loaded, FIRST, torch.cat([activations(1, 3), activations(1, 1)], dim=1))[:, -1:]
    assert (await owner.output() - expected).abs().max() < TOLERANCE
