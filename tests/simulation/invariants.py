"""What must hold at every hop at every moment, looked at while production code runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from swarm.server.session import HostedSession


@contextmanager
def checked(faults: list[str]) -> Iterator[None]:
    """While this lasts, note every hop that takes in a frame of another epoch than its session's."""
    accept, accept_rebuild = HostedSession.accept, HostedSession.accept_rebuild

    def look(session: HostedSession, message: Any) -> None:
        if int(message.epoch) != int(session.epoch):
            faults.append(f"a frame of epoch {message.epoch} was taken in by a session of epoch {session.epoch}")

    def accept_and_look(self: HostedSession, step: Any, *tensors: Any) -> None:
        accept(self, step, *tensors)
        look(self, step)

    def accept_rebuild_and_look(self: HostedSession, piece: Any, *tensors: Any) -> None:
        accept_rebuild(self, piece, *tensors)
        look(self, piece)

    HostedSession.accept, HostedSession.accept_rebuild = accept_and_look, accept_rebuild_and_look  # type: ignore[method-assign]
    try:
        yield
    finally:
        HostedSession.accept, HostedSession.accept_rebuild = accept, accept_rebuild  # type: ignore[method-assign]
