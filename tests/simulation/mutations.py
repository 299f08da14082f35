"""Repair, broken on purpose: each of these must be noticed by the simulator, or the simulator is worth nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from swarm.activations import Activations
from swarm.model.past import SpanPast
from swarm.protocol import journal, replay
from swarm.protocol.journal import Past, rebuild_messages
from swarm.server.gates import Facts, Gates, Stop, Stray
from swarm.server.session import HostedSession
from tests.simulation import run

Patch = pytest.MonkeyPatch


def skip_the_replay(patch: Patch) -> None:
    """New hops begin with nothing."""
    patch.setattr(journal.Journal, "past_after", lambda *_: ())


def replay_one_position_too_few(patch: Patch) -> None:
    """The last position is left out."""
    _replay(patch, lambda past: past.part(past.start, max(past.start + 1, past.stop - 1)))


def replay_one_position_twice(patch: Patch) -> None:
    """The first position comes twice, so that all others are one too far."""

    def doubled(past: Past) -> Past:
        first = past.part(past.start, past.start + 1)

        def twice(whole: Any, one: Any) -> Any:
            return None if whole is None else torch.cat([one, whole], dim=1)

        whole, one = past.activations, first.activations
        return Past(
            past.start,
            Activations(
                twice(whole.hidden, one.hidden), twice(whole.positions, one.positions), twice(whole.mask, one.mask)
            ),
        )

    _replay(patch, doubled)


def accept_a_stale_epoch(patch: Patch) -> None:
    """A hop takes frames of every epoch."""

    def of_the_previous_peer(session: HostedSession, facts: Facts) -> Stop | None:
        return None if facts.channel.peer == session.seat.previous else Stray("its activations come from another peer")

    patch.setattr(run, "GATES", Gates().replaced("seat", of_the_previous_peer))


def drop_the_rollback(patch: Patch) -> None:
    """A hop goes on from where it is."""
    rewind = SpanPast.rewind
    patch.setattr(SpanPast, "rewind", lambda self, keep, rows: rewind(self, keep and self.cache.length, rows))


def drop_the_rollback_in_a_replay(patch: Patch) -> None:
    """A journal keeps what was taken back, and drops what came instead."""
    past_after = journal.Journal.past_after

    def without(self: Any, step: int) -> tuple[Past, ...]:
        going_on, length = journal.Journal(), 0
        for entry in self._entries:
            if entry.past.start in {0, length}:
                going_on._entries.append(entry)
                length = entry.past.stop
        return past_after(going_on, step)

    patch.setattr(journal.Journal, "past_after", without)


def ignore_a_gather(patch: Patch) -> None:
    """Rows stay where they are, as far as there are enough of them."""
    rewind = SpanPast.rewind

    def ignoring(self: Any, keep: int, rows: Sequence[int] | None) -> None:
        rewind(self, keep, None if rows is None else [min(i, max(rows)) for i in range(len(rows))])

    patch.setattr(SpanPast, "rewind", ignoring)


def ignore_a_gather_in_a_replay(patch: Patch) -> None:
    """A journal's rows stay where they are."""
    gathered = Past.gathered
    patch.setattr(
        Past,
        "gathered",
        lambda self, rows: gathered(self, torch.arange(len(rows)).clamp(max=self.rows - 1)),
    )


MUTATIONS: tuple[Callable[[Patch], None], ...] = (
    skip_the_replay,
    replay_one_position_too_few,
    replay_one_position_twice,
    accept_a_stale_epoch,
    drop_the_rollback,
    drop_the_rollback_in_a_replay,
    ignore_a_gather,
    ignore_a_gather_in_a_replay,
)


def _replay(patch: Patch, change: Callable[[Past], Past]) -> None:
    def changed(name: str, epoch: int, pieces: Sequence[Past], hops: int, *chunk_bytes: int) -> Any:
        whole = [change(journal._joined(pieces, journal._beside(pieces)))] if pieces else []
        return rebuild_messages(name, epoch, whole, hops, *chunk_bytes)

    patch.setattr(replay, "rebuild_messages", changed)
