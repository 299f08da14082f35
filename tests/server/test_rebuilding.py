"""A past that comes from elsewhere, and is computed here."""

import pytest
import torch

from swarm.activations import Activations
from swarm.compute.task import Task
from swarm.protocol.messages import AnyMessage, Close, Reroute, Rerouted
from swarm.server.limits import MemoryLimits
from swarm.server.server import ServerLimits
from tests.server.sites import (
    FIRST,
    HIDDEN,
    TOKEN_BYTES,
    TOLERANCE,
    Loaded,
    Peer,
    Site,
    activations,
    code,
    opened,
    rebuild,
    rebuilt,
    serving,
    span_output,
    step,
    until,
)


@pytest.mark.parametrize("times", [1, 2])
async def test_a_rebuilt_hop_is_where_the_dead_one_was(loaded: Loaded, first: Site, owner: Peer, times: int):
    """Pieces that come twice change nothing."""
    request = await opened(owner, first, after_step=7, rebuild=True)
    channel = await owner.to(first)
    early, token = step(request, 8, activations(1, 1), keep=6)
    assert code(await owner.ask(first, early, token)) == "out_of_order"  # it has no past yet
    past = activations(1, 6)
    for start in (0, 4):
        piece = past[:, start : start + 4]
        for _ in range(times):
            channel.send(rebuild(request, start, 6, piece), Activations(piece))
    assert [await owner.next() for _ in range(2)] == [rebuilt(request, 4), rebuilt(request, 6)]
    channel.send(early, token)
    expected = span_output(loaded, FIRST, torch.cat([past, activations(1, 1)], dim=1))[:, -1:]
    assert (await owner.output() - expected).abs().max() < TOLERANCE


async def test_the_scheduler_tells_a_lost_past_from_a_prompt(first: Site, owner: Peer, monkeypatch):
    submit, tasks = first.server.executor.submit, list[Task]()
    monkeypatch.setattr(first.server.executor, "submit", lambda task, done: (tasks.append(task), submit(task, done)))
    request = await opened(owner, first, after_step=0, rebuild=True)
    past = activations(1, 6)
    assert await owner.ask(first, rebuild(request, 0, 6, past), Activations(past)) == rebuilt(request, 6)
    message, token = step(request, 1, activations(1, 1), keep=6)
    (await owner.to(first)).send(message, token)
    await owner.output()
    assert [task.replays for task in tasks if task.tenure is not None] == [True, False]


@pytest.mark.parametrize(("start", "total", "rows"), [(1, 6, 1), (0, 2, 1), (0, 10_000, 1)], ids=str)
async def test_a_malformed_piece_of_the_past_is_refused(first: Site, owner: Peer, start: int, total: int, rows: int):
    request = await opened(owner, first, after_step=1, rebuild=True)
    piece = activations(rows, 3)
    assert code(await owner.ask(first, rebuild(request, start, total, piece), Activations(piece))) == "bad_request"


async def test_a_past_that_is_not_finite_is_refused(first, owner):
    request = await opened(owner, first, after_step=1, rebuild=True)
    piece = torch.full((1, 3, 64), float("nan"))
    assert code(await owner.ask(first, rebuild(request, 0, 3, piece), Activations(piece))) == "bad_activations"


async def test_an_unexpected_past_is_refused_and_a_strangers_ignored(first: Site, owner: Peer, stranger: Peer):
    request = await opened(owner, first)
    piece = activations(1, 3)
    assert code(await owner.ask(first, rebuild(request, 0, 3, piece), Activations(piece))) == "bad_request"
    (await stranger.to(first)).send(rebuild(request, 0, 3, piece), Activations(piece))
    await stranger.settled(first)
    assert stranger.inbox.empty()
    assert first.server.pool.used == 0


async def test_a_past_comes_from_its_previous_hop_and_in_its_epoch_alone(first: Site, owner: Peer, stranger: Peer):
    request = await opened(owner, first, epoch=5, previous=first.peer, after_step=1, rebuild=True)
    piece = activations(1, 3)
    for sender, epoch in ((stranger, 5), (owner, 5), (stranger, 4), (stranger, 6)):
        (await sender.to(first)).send(
            rebuild(request, 0, 3, piece).model_copy(update={"epoch": epoch}), Activations(piece)
        )
        await sender.settled(first)
    again = Reroute(session=request.session, epoch=7, previous=stranger.peer, reset=True, after_step=1)
    assert isinstance(await owner.ask(first, again), Rerouted)
    for epoch in (5, 6, 8):
        (await stranger.to(first)).send(
            rebuild(request, 0, 3, piece).model_copy(update={"epoch": epoch}), Activations(piece)
        )
    await stranger.settled(first)
    assert first.computed == 0
    assert first.server.pool.used == 0
    assert owner.inbox.empty()
    granted = request.model_copy(update={"epoch": 7})
    (await stranger.to(first)).send(rebuild(granted, 0, 3, piece), Activations(piece))
    assert await stranger.next() == rebuilt(granted, 3)


async def test_a_hop_confirms_a_passed_on_past_after_the_next(first: Site, owner: Peer, stranger: Peer):
    request = await opened(owner, first, previous=stranger.peer, relay=True, after_step=1, rebuild=True)
    channel, past = await stranger.to(first), activations(1, 8)
    for start in (0, 4):
        piece = past[:, start : start + 4]
        channel.send(rebuild(request, start, 8, piece).model_copy(update={"hops": 2}), Activations(piece))
    assert [(await owner.next()).kind for _ in range(3)] == ["rebuild", "rebuild", "rebuilt"]
    (await owner.to(first)).send(rebuilt(request, 4))
    assert await stranger.next() == rebuilt(request, 4)
    (await owner.to(first)).send(rebuilt(request, 8))
    assert await stranger.next() == rebuilt(request, 8)
    assert stranger.inbox.empty()
    assert owner.inbox.empty()


async def test_a_past_begins_only_with_room_for_its_window(first: Site, owner: Peer):
    """Many pasts that all came in part would refuse each other's rest, for ever."""
    windows = first.server.memory.windows
    windows.capacity = 9 * 6 * HIDDEN * 4 // 8 + 1  # one peer may have 8/9 of it, which is one such past
    requests = [await opened(owner, first, after_step=1, rebuild=True) for _ in range(2)]
    channel, past = await owner.to(first), activations(1, 6)
    begin, end = past[:, :4], past[:, 4:]
    assert await owner.ask(first, rebuild(requests[0], 0, 6, begin), Activations(begin)) == rebuilt(requests[0], 4)
    assert code(await owner.ask(first, rebuild(requests[1], 0, 6, begin), Activations(begin))) == "busy"
    assert await owner.ask(first, rebuild(requests[0], 4, 6, end), Activations(end)) == rebuilt(requests[0], 6)
    assert windows.used == 0
    assert await owner.ask(first, rebuild(requests[1], 0, 6, begin), Activations(begin)) == rebuilt(requests[1], 4)
    again = Reroute(session=requests[1].session, epoch=1, reset=True, after_step=1)
    assert isinstance(await owner.ask(first, again), Rerouted)
    assert windows.used == 0
    channel.send(Close(session=requests[0].session))
    channel.send(Close(session=requests[1].session))
    await until(lambda: first.idle)


async def test_the_window_of_a_past_that_stops_coming_is_freed(loaded: Loaded, owner: Peer):
    """Else the beginnings of many pasts, of which nothing more comes, keep all others from being rebuilt."""
    limits = ServerLimits(memory=MemoryLimits(window_use_bytes_min=4 * TOKEN_BYTES))  # what comes first
    async with serving(loaded, FIRST, limits=limits) as first:
        request = await opened(owner, first, after_step=1, rebuild=True)
        windows, (session,) = first.server.memory.windows, first.server.handler.sessions.values()
        past = activations(1, 8)

        async def send(start: int, stop: int) -> AnyMessage:
            piece = past[:, start:stop]
            return await owner.ask(first, rebuild(request, start, 8, piece), Activations(piece))

        assert await send(0, 4) == rebuilt(request, 4)
        session.holdings.review_window()
        assert windows.used == past.nbytes
        assert await send(4, 5) == rebuilt(request, 5)
        session.holdings.review_window()
        assert windows.used == 0
        assert await send(5, 8) == rebuilt(request, 8)
