"""Memory that sessions take, and give back."""

import gc
from weakref import ref

import pytest
import torch
from torch.testing import assert_close

from swarm.activations import Activations
from swarm.protocol.messages import Close, Opened, Reroute
from swarm.protocol.tensors import meta_of
from tests.server.sites import (
    POOL_TOKENS,
    SECOND,
    TOKEN_BYTES,
    Loaded,
    Peer,
    Site,
    activations,
    code,
    held_up,
    local,
    open_for,
    opened,
    opened_ring,
    rebuild,
    serving,
    step,
    until,
)


async def test_a_full_pool_refuses_a_step_with_a_retry_time(first: Site, owner: Peer, stranger: Peer):
    holder = await opened(stranger, first)
    (await stranger.to(first)).send(*step(holder, 1, activations(1, 2)))
    await stranger.output()
    room = first.server.pool.free(owner.peer)
    request = await opened(owner, first, positions_max=POOL_TOKENS)
    refused = await owner.ask(first, *step(request, 1, activations(1, room + 1)))
    assert code(refused) == "no_room"
    assert refused.retry_after_ms > 0
    assert first.server.pool.used == 2
    (await owner.to(first)).send(*step(request, 1, activations(1, room)))
    await owner.output()


async def test_a_step_that_never_fits_gets_no_retry_time(first: Site, owner: Peer):
    room = first.server.pool.most
    request = await opened(owner, first, positions_max=POOL_TOKENS)
    refused = await owner.ask(first, *step(request, 1, activations(1, room + 1)))
    assert (code(refused), refused.retry_after_ms) == ("no_room", None)


async def test_a_step_refused_downstream_is_retransmitted_and_computed_once_each(
    loaded: Loaded, first: Site, owner: Peer, stranger: Peer
):
    async with serving(loaded, SECOND, pool_tokens=10) as second:
        holder = await opened(stranger, second, start=3, stop=6)
        (await stranger.to(second)).send(*step(holder, 1, activations(1, 8)))
        await stranger.output()
        request = await opened_ring(owner, first, second)
        hidden = activations(1, 5)
        message = step(request, 1, hidden, want=5)
        assert code(await owner.ask(first, *message)) == "no_room"
        (await stranger.to(second)).send(Close(session=holder.session))
        await stranger.settled(second)
        (await owner.to(first)).send(*message)
        # Where a frame happens to lie in memory decides in which order kernels add up.
        assert_close(await owner.output(), local(loaded, hidden), rtol=1e-4, atol=1e-4)
        assert (first.computed, second.computed) == (1, 2)


async def test_cache_is_held_until_what_frees_it_has_been_computed(first: Site, owner: Peer):
    """Else steps that gather many rows wait, uncharged, behind others that took their charge back."""
    request = await opened(owner, first)
    channel = await owner.to(first)
    channel.send(*step(request, 1, activations(1, 20)))
    await owner.output()
    release = held_up(first)
    channel.send(*step(request, 2, activations(4, 1), keep=20, rows=(0,) * 4))
    channel.send(*step(request, 3, activations(1, 1), keep=0))
    await owner.settled(first)
    assert first.server.pool.used == 4 * 21
    channel.send(Close(session=request.session))
    await owner.settled(first)
    assert first.server.pool.used == 4 * 21, "its session has ended, the compute thread has not done with it"
    release.set()
    await until(lambda: first.idle)


async def test_a_rollback_that_has_been_computed_gives_cache_back(first: Site, owner: Peer):
    request = await opened(owner, first)
    for number, tokens in ((1, 20), (2, 3)):
        (await owner.to(first)).send(*step(request, number, activations(1, tokens), keep=0))
        await owner.output()
        assert first.server.pool.used == tokens


async def test_a_peer_gets_a_share_of_the_inputs_that_wait(first, owner, stranger):
    first.server.memory.inputs.capacity = 9 * 10 * TOKEN_BYTES
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
    assert first.server.memory.inputs.used == 0
    channel.send(*step(request, 8, activations(1, 11)))
    await owner.output()


async def test_an_ended_session_holds_its_inputs_until_they_come_back(first, owner):
    request = await opened(owner, first)
    release = held_up(first)
    channel = await owner.to(first)
    channel.send(*step(request, 1, activations(1, 10)))
    channel.send(Close(session=request.session))
    await until(lambda: not first.server.handler.sessions)
    assert first.server.memory.inputs.used == 10 * TOKEN_BYTES
    release.set()
    await until(lambda: first.idle)


async def test_a_reset_session_keeps_its_tenant_and_no_outputs(first, owner):
    request = await opened(owner, first, tenant="ab")
    (await owner.to(first)).send(*step(request, 1, activations(1, 1)))
    await owner.output()
    assert first.server.memory.outputs.used == TOKEN_BYTES
    await owner.ask(first, Reroute(session=request.session, epoch=1, reset=True, after_step=1))
    assert first.server.memory.outputs.used == 0
    assert first.server.handler.sessions[request.session].tenure.tenant == "ab"


@pytest.mark.parametrize("kind", ["step", "past"])
async def test_positions_are_kept_without_the_frame_they_came_in(first: Site, second: Site, owner: Peer, kind: str):
    request = open_for(first, next_record=second.record(), rebuild=kind == "past")
    assert isinstance(await owner.ask(first, request), Opened)
    session = first.server.handler.sessions[request.session]
    hidden, frame = activations(1, 4), torch.arange(1000)
    positions = frame[:4][None]
    message = step(request, 1, hidden)[0] if kind == "step" else rebuild(request, 0, 4, hidden)
    message = message.model_copy(update={"positions": meta_of(positions)})
    first.server.handler.on_message(session.owner, message, Activations(hidden, positions))
    await until(lambda: session.history.journal.n_bytes > 0)
    (past,) = session.history.journal.past_after(1)
    assert torch.equal(past.activations.positions, positions)
    assert past.activations.positions.untyped_storage().nbytes() == positions.nbytes


@pytest.mark.parametrize("under_way", [False, True])
async def test_the_past_of_an_ended_session_is_free_whoever_holds_the_session(
    first: Site, owner: Peer, under_way: bool
):
    request = await opened(owner, first)
    channel = await owner.to(first)
    channel.send(*step(request, 1, activations(1, 20)))
    await owner.output()
    session = first.server.handler.sessions[request.session]  # as a frame or a traceback may
    past = ref(session.tenure.past.cache)
    gc.disable()
    try:
        if under_way:
            release = held_up(first)
            channel.send(*step(request, 2, activations(1, 1), keep=20))
            await until(lambda: session.holdings.is_computing)
            channel.send(Close(session=request.session))
            await until(lambda: session.tenure.over)
            release.set()
        else:
            channel.send(Close(session=request.session))
        await until(lambda: past() is None)
    finally:
        gc.enable()
    assert first.server.pool.used == 0
