"""Moves a session away from hops between two steps: of those that are about to leave, and of those that lie."""

import asyncio

import structlog

from swarm.client.session.circuit import Circuit
from swarm.client.session.restore import Restorer
from swarm.client.session.watch import Watcher
from swarm.errors import RouteError, SessionError

_log = structlog.get_logger("swarm.session")


class Mover:
    """One session's moves. lock: the session's, held during a step."""

    def __init__(
        self,
        circuit: Circuit,
        restorer: Restorer,
        watcher: Watcher,
        lock: asyncio.Lock,
        *,
        timeout_s: float,
        pause_s: float,
    ) -> None:
        """timeout_s: of one move. pause_s: between two searches for servers that could take over from one."""
        self._circuit = circuit
        self._restorer = restorer
        self._watcher = watcher
        self._lock = lock
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        self._leaving: set[str] = set()  # processes
        self._expelled: set[str] = set()  # those of them whose outputs are wrong
        self._stays: dict[
            str, float
        ] = {}  # processes that no other could take over from, and until when none is sought
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._rested_at = self._loop.time()  # when the last step was over

    def idle_s(self) -> float:
        """How long the session has had no step; 0 while there is one."""
        return 0.0 if self._lock.locked() else self._loop.time() - self._rested_at

    def ask(self, process: str) -> None:
        """A hop is about to leave."""
        if process not in self._expelled and self._loop.time() < self._stays.get(process, 0.0):
            return
        self._leaving.add(process)
        self._move_soon()

    def expel(self, process: str) -> None:
        """A hop computes wrongly."""
        self._expelled.add(process)
        self.ask(process)

    @property
    def is_asked(self) -> bool:
        """Whether the session is to move as soon as nothing is in flight."""
        return bool(self._leaving)

    def rest(self) -> None:
        """A step is over."""
        self._rested_at = self._loop.time()
        if self._leaving:
            self._move_soon()

    def stop(self) -> None:
        """The session ends."""
        if self._task is not None:
            self._task.cancel()

    def _move_soon(self) -> None:
        if self._leaving and not self._lock.locked() and (self._task is None or self._task.done()):
            self._task = self._loop.create_task(self._move())

    async def _move(self) -> None:
        async with self._lock:
            leaving, self._leaving = self._leaving & {hop.process for hop in self._circuit.layout.hops}, set()
            if self._circuit.is_closed or not leaving:
                return
            if leaving & self._expelled:
                self._circuit.leave()  # the next step opens it anew elsewhere, from the client's own journal
                return
            if not self._circuit.is_standing:
                return
            deadline = self._loop.time() + self._timeout_s
            try:
                async with asyncio.timeout_at(deadline):
                    with self._watcher:
                        moved = await self._restorer.replace(leaving, deadline)
            except (TimeoutError, SessionError, RouteError) as error:
                _log.info("could not move", session=self._circuit.session[:8], why=str(error))  # the next step will
                return
        if not moved:
            until = self._loop.time() + self._pause_s
            self._stays = dict.fromkeys(leaving, until)
            session, hops = self._circuit.session[:8], sorted(leaving)
            _log.info("no hop can take over from hops that leave", session=session, hops=hops)
