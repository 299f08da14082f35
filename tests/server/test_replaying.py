"""A journal, and the replay that goes out from here."""

import pytest

from swarm.protocol.journal import Journal, JournalLimits
from swarm.protocol.messages import Rebuild, Rebuilt, Replay, Reroute, Rerouted, Step
from swarm.protocol.replay import ReplayLimits
from tests.server.sites import (
    FIRST,
    HIDDEN,
    TOKEN_BYTES,
    Loaded,
    Peer,
    Site,
    activations,
    bounded,
    opened,
    rebuilt,
    serving,
    step,
    until,
)


async def test_a_replay_sends_no_more_than_its_window_unconfirmed(loaded: Loaded, owner: Peer, stranger: Peer):
    """The first piece goes alone, then a window. Only the next hop counts, and of this route."""
    piece_bytes = 4 * TOKEN_BYTES
    limits = bounded(replay=ReplayLimits(window_bytes=3 * piece_bytes, chunk_bytes=piece_bytes))
    async with serving(loaded, FIRST, limits=limits) as first:
        request = await opened(owner, first, relay=True)
        channel = await owner.to(first)
        channel.send(*step(request, 1, activations(1, 30)))
        assert isinstance(await owner.next(), Step)

        async def pieces(*said: Rebuilt, by: Peer = owner) -> list[int]:
            for message in said:
                (await by.to(first)).send(message)
            for peer in (by, owner):
                await peer.settled(first)
            return [message.start for message, _ in (owner.inbox.get_nowait() for _ in range(owner.inbox.qsize()))]

        channel.send(Replay(session=request.session, epoch=0, step=1, hops=1))
        assert await pieces() == [0]
        assert await pieces(rebuilt(request, 30), by=stranger) == []
        assert await pieces(rebuilt(request, 30).model_copy(update={"epoch": 1})) == []
        assert await pieces(rebuilt(request, 3)) == []
        assert await pieces(rebuilt(request, 4)) == [4, 8, 12]
        assert await pieces(rebuilt(request, 4)) == []
        assert await pieces(rebuilt(request, 12)) == [16, 20]
        assert await pieces(rebuilt(request, 30), rebuilt(request, 30)) == [24, 28]
        assert isinstance(await owner.ask(first, Reroute(session=request.session, epoch=1, relay=True)), Rerouted)
        channel.send(Replay(session=request.session, epoch=1, step=1, hops=1))
        assert await pieces() == [0]
        assert isinstance(await owner.ask(first, Reroute(session=request.session, epoch=2, relay=True)), Rerouted)
        for epoch in (1, 2):
            assert await pieces(rebuilt(request, 4).model_copy(update={"epoch": epoch})) == []


async def test_a_past_is_replayed_once_an_epoch_however_often_it_is_asked_for(
    first: Site, owner: Peer, monkeypatch: pytest.MonkeyPatch
):
    """To find it is work for the event loop, and asking costs nothing; another epoch is charged."""
    found: list[int] = []
    past_after = Journal.past_after
    monkeypatch.setattr(Journal, "past_after", lambda self, step: (found.append(step), past_after(self, step))[1])
    request = await opened(owner, first, relay=True)
    channel = await owner.to(first)
    channel.send(*step(request, 1, activations(1, 4)))
    assert isinstance(await owner.next(), Step)
    for epoch in (0, 1):
        if epoch:
            assert isinstance(await owner.ask(first, Reroute(session=request.session, epoch=1, relay=True)), Rerouted)
        for confirmed in (False, True):
            for _ in range(3):
                channel.send(Replay(session=request.session, epoch=epoch, step=1, hops=1))
            if not confirmed:
                assert isinstance(await owner.next(), Rebuild)
                channel.send(rebuilt(request, 4).model_copy(update={"epoch": epoch}))
        await owner.settled(first)
        assert owner.inbox.empty()
        assert found == [1] * (epoch + 1)


async def test_a_journal_too_large_to_fold_is_dropped_uncopied(
    loaded: Loaded, owner: Peer, monkeypatch: pytest.MonkeyPatch
):
    """Many rows for one step only, at which the steps before are put together: no other step has to pay for them."""
    unfolded, rows, length = 8, 16, 8
    limits, noted, add = bounded(journal=JournalLimits(unfolded)), [], Journal.add
    monkeypatch.setattr(Journal, "add", lambda self, entry: (noted.append(entry.step), add(self, entry))[1])
    async with serving(loaded, FIRST, limits=limits) as first:
        journals = first.server.memory.journals
        journals.capacity = rows * length * HIDDEN * 4
        request = await opened(owner, first, relay=True)
        session = first.session(request)
        channel = await owner.to(first)
        for number in range(1, unfolded + 2):
            has = rows if number == unfolded // 2 else 1
            order = {unfolded // 2: (0,) * rows, unfolded // 2 + 1: (0,)}.get(number)
            hidden = activations(has, 1 if number > 1 else length)
            channel.send(*step(request, number, hidden, keep=length if number > 1 else 0, rows=order))
            assert isinstance(await owner.next(), Step)
            assert (session.history.journal is None) == (number > unfolded)
        assert noted == [*range(1, unfolded + 1)]  # the step that would have put the others together never came in
        assert journals.used == 0


async def test_what_a_replay_keeps_is_charged_until_it_is_over_and_steps_do_not_end_it(loaded: Loaded, owner: Peer):
    """A peer that confirms nothing, and goes on from the start, would keep the whole past uncharged."""
    limits = bounded(journal=JournalLimits(4), replay=ReplayLimits(chunk_bytes=10 * TOKEN_BYTES))
    async with serving(loaded, FIRST, limits=limits) as first:
        request = await opened(owner, first, relay=True)
        channel, journals = await owner.to(first), first.server.memory.journals
        (session,) = first.server.handler.sessions.values()
        channel.send(*step(request, 1, activations(1, 50)))
        await owner.next()
        whole = journals.used
        channel.send(Replay(session=request.session, epoch=0, step=1, hops=1))
        assert isinstance(await owner.next(), Rebuild)  # the first piece, alone
        for number in range(2, 9):  # those that were on their way, in an honest session
            channel.send(*step(request, number, activations(1, 1)))
            assert isinstance(await owner.next(), Step)
            assert journals.used >= whole
        session.drop_journal()
        assert journals.used >= whole
        channel.send(rebuilt(request, 10))
        assert [(await owner.next()).start for _ in range(4)] == [10, 20, 30, 40]
        await until(lambda: journals.used == 0)
        channel.send(Replay(session=request.session, epoch=0, step=8, hops=1))
        await owner.settled(first)
        assert owner.inbox.empty()  # once an epoch, still
