"""The hidden side of a meeting: keep lines to anchors, and come when a peer calls (docs/reach.md)."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import structlog

from swarm.errors import NetworkError
from swarm.limits import limit
from swarm.net.address import ViaAnchor, dialable
from swarm.net.channel import Channel
from swarm.net.endpoint import Endpoint
from swarm.net.halves import open_half
from swarm.net.lines import Lines
from swarm.net.listener import Listener
from swarm.net.punch import Here, PunchLimits, punch
from swarm.net.rate import TokenBucket
from swarm.net.reach import makes_sense, network_of
from swarm.protocol.meeting import Called, Meet, Moor

_log = structlog.get_logger("swarm.net")


@dataclass(frozen=True, slots=True)
class MooringLimits:
    """How a hidden peer keeps its moorings, and how often it comes."""

    wanted: int = limit(3, "moorings", "at different anchors, where there are as many")
    known_max: int = limit(32, "anchors", "that are remembered for when one ends; the oldest is forgotten")
    answer_s: float = limit(4.0, "s", "an anchor that has not taken the mooring by then is left")
    ping_s: float = limit(3.0, "s", "between pings on a mooring")
    silent_s: float = limit(3.0, "s", "an anchor that does not answer a ping for longer is left")
    again_s: float = limit(5.0, "s", "before an anchor that could not be used is tried again")
    come_s: float = limit(8.0, "s", "for one call; then it is over")
    reverse_s: float = limit(1.5, "s", "to dial a caller that says that it can be dialled")
    per_s: float = limit(
        5.0, "calls/s", "of one anchor that are answered, a few more than it sends; others are ignored"
    )
    burst: float = limit(40.0, "calls", "of one anchor at once")
    coming_max: int = limit(64, "calls", "that are answered at one time; others are ignored")
    punch: PunchLimits = field(default_factory=PunchLimits)


@dataclass(slots=True)
class _Mooring:
    anchor: ViaAnchor
    line: Channel
    rate: TokenBucket


class Moorings:
    """The moorings of one process. Lives in the event loop."""

    def __init__(
        self,
        me: Endpoint,
        lines: Lines,
        listener: Listener,
        record: Callable[[], bytes],
        limits: MooringLimits = MooringLimits(),
    ) -> None:
        """listener: takes the connections of callers. record: this peer's newest signed announcement."""
        self.on_change: Callable[[], None] = lambda: None
        self._me, self._lines, self._listener, self._record, self._limits = me, lines, listener, record, limits
        self._known: dict[ViaAnchor, float] = {}  # when each may be tried
        self._held: dict[ViaAnchor, _Mooring] = {}
        self._look = asyncio.Event()
        self._renewals = 0
        self._coming: set[asyncio.Task[None]] = set()
        lines.on_called = self._called

    @property
    def anchors(self) -> tuple[ViaAnchor, ...]:
        """Where this peer is moored now, the longest first."""
        return tuple(self._held)

    def offer(self, anchors: Iterable[ViaAnchor]) -> None:
        """Remember anchors that could be used."""
        for anchor in anchors:
            if anchor.peer == self._me.identity.peer_id:
                continue
            self._known.setdefault(anchor, 0.0)
            if len(self._known) > self._limits.known_max:
                del self._known[next(iter(self._known))]
        self._look.set()

    def renew(self) -> None:
        """Moor anew at once: this machine has another address, or its connections have died in its sleep."""
        self._renewals += 1
        self._known = {anchor: at if at == float("inf") else 0.0 for anchor, at in self._known.items()}
        for mooring in tuple(self._held.values()):
            mooring.line.cut_off("this machine has moved")
        self._look.set()

    async def run(self) -> None:
        """Keep as many moorings as are wanted, until cancelled; then let go of all."""
        keeping: set[asyncio.Task[None]] = set()
        try:
            while True:
                for anchor in self._next(self._limits.wanted - len(keeping)):
                    task = asyncio.create_task(self._keep(anchor))
                    keeping.add(task)
                    task.add_done_callback(keeping.discard)
                    task.add_done_callback(lambda _: self._look.set())
                self._look.clear()
                try:
                    async with asyncio.timeout(self._limits.again_s):
                        await self._look.wait()
                except TimeoutError:
                    continue
        finally:
            tasks = [*keeping, *self._coming]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _next(self, count: int) -> list[ViaAnchor]:
        """Return anchors to try now, each once: of other networks than the present ones, as far as there are."""
        now = asyncio.get_running_loop().time()
        free = [anchor for anchor, at in self._known.items() if at <= now]
        used = {network_of(anchor.at.host) for anchor in self._held}
        free.sort(key=lambda anchor: network_of(anchor.at.host) in used)
        taken = {anchor.peer for anchor, at in self._known.items() if at == float("inf")}
        others = {anchor.peer: anchor for anchor in reversed(free) if anchor.peer not in taken}  # the first of each
        chosen = [anchor for anchor in free if others.get(anchor.peer) is anchor][: max(0, count)]
        for anchor in chosen:
            self._known[anchor] = float("inf")
        return chosen

    async def _keep(self, anchor: ViaAnchor) -> None:
        """Moor, and stay until the line ends."""
        loop, limits, line = asyncio.get_running_loop(), self._limits, None
        renewals = self._renewals
        try:
            line = await self._lines.open(anchor)
            taken = self._lines.expect(line)
            line.send(Moor(record=self._record().hex()))
            async with asyncio.timeout(limits.answer_s):
                await asyncio.shield(taken)
            self._held[anchor] = _Mooring(anchor, line, TokenBucket(limits.per_s, limits.burst))
            self.on_change()
            while True:
                await asyncio.wait((line.ended,), timeout=limits.ping_s)
                async with asyncio.timeout(limits.silent_s):
                    await line.ping()
        except (NetworkError, TimeoutError) as error:
            _log.info("not moored", anchor=str(anchor), why=str(error) or "it does not answer")
        finally:
            self._known[anchor] = loop.time() + (limits.again_s if renewals == self._renewals else 0.0)
            if line is not None:
                self._lines.forget(line)  # or the next mooring on this line would get a refusal that is over
            if self._held.pop(anchor, None) is not None and line is not None:
                line.cut_off("the mooring is over")
                self.on_change()
            elif line is not None:
                self._lines.release(line)

    # Calls

    def _called(self, line: Channel, called: Called) -> None:
        mooring = next((its for its in self._held.values() if its.line is line), None)
        now = asyncio.get_running_loop().time()
        if mooring is None or len(self._coming) >= self._limits.coming_max or mooring.rate.take(now) > 0:
            return
        task = asyncio.create_task(self._come(line, mooring.anchor, called))
        self._coming.add(task)
        task.add_done_callback(self._coming.discard)

    async def _come(self, line: Channel, anchor: ViaAnchor, called: Called) -> None:
        try:
            async with asyncio.timeout(self._limits.come_s):
                if not await self._dial_back(called):
                    await self._meet(line, anchor, called)
        except (OSError, ValueError, TimeoutError, NetworkError) as error:
            _log.debug("did not meet", caller=called.caller, why=str(error) or type(error).__name__)

    async def _dial_back(self, called: Called) -> bool:
        """Dial the caller, if it can be dialled."""
        for reach in dialable((called.reach,)):
            if reach.port < 1024 or not makes_sense(reach.host, self._me.public):
                continue
            try:
                async with asyncio.timeout(self._limits.reverse_s):
                    sock = await open_half(reach, bytes.fromhex(called.back), self._me.public)
            except (OSError, TimeoutError) as error:
                _log.debug("cannot dial back", reach=str(reach), why=str(error))
                continue
            self._listener.adopt(sock, "reverse")
            return True
        return False

    async def _meet(self, line: Channel, anchor: ViaAnchor, called: Called) -> None:
        met = self._lines.expect(line, called.token)
        try:
            half = await open_half(anchor.at, bytes.fromhex(called.token), self._me.public)
            try:
                here = Here.of(half)
                meet = await asyncio.shield(met)
                assert isinstance(meet, Meet)
            except BaseException:
                half.close()
                raise
        finally:
            self._lines.forget(line, called.token)
        self._listener.adopt(half, "relayed")
        peers, locals_ = dialable((meet.peer,)), dialable((meet.local,))
        if peers:
            local = locals_[0] if locals_ else None
            sock = await punch(here, peers[0], local, self._me.public, self._limits.punch)
            if sock is not None:
                self._listener.adopt(sock, "punched")
