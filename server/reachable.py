"""How others reach this server, found out by itself: at an address, or through anchors (docs/reach.md).

It announces its addresses and lets other nodes try them. Where that fails, it moors at anchors, which the same nodes
offer or know, and announces these. It goes on looking: a port may be forwarded later, a network may change.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import structlog

from swarm.dht.dialback import Findings, Offer, ask_dial_back
from swarm.dht.node import SwarmNode
from swarm.dht.records import Announcement, Mooring, SignedAnnouncement
from swarm.errors import TooBusy, Unreachable
from swarm.identity import public_key_of
from swarm.limits import limit
from swarm.net.address import Tcp, ViaAnchor, dialable
from swarm.net.addresses import Change, dialled_at
from swarm.net.endpoint import Endpoint
from swarm.net.mapping import Mapped
from swarm.net.traversal import ListeningTraversal

_log = structlog.get_logger("swarm.server")

Ask = Callable[..., Awaitable[Findings]]
"""`await ask(node, signed, data_port=..., p2p_port=...)`, as `ask_dial_back`."""


@dataclass(frozen=True, slots=True)
class ReachLimits:
    """How often a server looks how it is reached."""

    moored_s: float = limit(4.0, "s", "to the first mooring, once it is known that no address leads here")
    again_s: float = limit(30.0, "s", "until a server looks again that cannot be reached, or that no node could try")
    busy_s: float = limit(2.0, "s", "until busy helpers are asked once more, by a server that starts")
    busy_tries: int = limit(3, "times", "that they are asked; then the server waits as one that cannot be reached")
    look_s: float = limit(300.0, "s", "between looks at how a running server is reached")
    lost_s: float = limit(5.0, "s", "between looks of a hidden server that lost an anchor, or has none")
    first_look_s: float = limit(1.0, "s", "after it is online, its ports are tried from outside")


@dataclass(frozen=True, slots=True)
class Listening:
    """Where this process listens. named: by its operator, as "host:port"; none for the addresses that it has."""

    named: tuple[str, ...]
    at: Tcp
    p2p_port: int

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses to announce, unless others find that they lead nowhere. This machine's own may change."""
        return self.named or dialled_at(self.at)


class Reachability:
    """How one server is reached now. Lives in the event loop."""

    def __init__(
        self,
        node: SwarmNode,
        me: Endpoint,
        traversal: ListeningTraversal,
        listening: Listening,
        changes: AsyncIterator[Change],
        mapped: Mapped | None = None,
        limits: ReachLimits = ReachLimits(),
        ask: Ask | None = None,
    ) -> None:
        """mapped: the data port, as the home router forwards it. changes: of this machine's addresses, for `watch`.

        ask: `ask_dial_back` unless given.
        """
        self.on_change: Callable[[], None] = lambda: None
        self._node, self._me, self._traversal = node, me, traversal
        self._listening, self._mapped, self._limits, self._changes = listening, mapped, limits, changes
        self._ask_helpers = ask or ask_dial_back
        self._own = listening.addresses
        self.addresses = self._candidates()
        self._hidden = False
        self._again = asyncio.Event()  # set to look again soon
        self._moored = asyncio.Event()
        self._moorings_before = 0
        self._mooring: asyncio.Task[None] | None = None
        traversal.moorings.on_change = self._moorings_changed

    @property
    def anchors(self) -> tuple[Mooring, ...]:
        """Where this server is moored, as its record says it."""
        vias = self._traversal.moorings.anchors if self._hidden else ()
        return tuple(Mooring(public_key_of(via.peer).hex(), via.channel_key.hex(), str(via.at)) for via in vias)

    @property
    def text(self) -> str:
        """How it is reached, for people."""
        if not self._hidden:
            return f"at {', '.join(self.addresses)}"
        n = len(self._traversal.moorings.anchors)
        return f"behind a router, through {n} anchor{'s' if n > 1 else ''}"

    def applied(self, announcement: Announcement) -> Announcement:
        """Return an announcement that says how this server is reached."""
        return announcement.model_copy(update={"addresses": self.addresses, "anchors": self.anchors})

    def offer(self) -> Offer | None:
        """Return where hidden peers may moor: here, if this server is reached at an address."""
        if self._hidden or not self._traversal.caller.port:
            return None
        key = self._me.identity.public_key.hex()
        return Offer(public_key=key, channel_key=self._me.key.public.hex(), addresses=self.addresses)

    async def find(self, announce: Callable[[], Awaitable[SignedAnnouncement | None]]) -> bool:
        """Find out how this server is reached, and become so. Returns whether it is.

        announce: announces this server as it is reached now; None where that fails, and then this is not known yet.
        Findings about where it was before it moved do not count.
        """
        self._again.clear()
        if self._hidden and not self._traversal.moorings.anchors:  # no way led here: try all anew
            self._show(self._candidates(), found=False)
        signed = await announce()
        if signed is None:
            return False
        try:
            findings = await self._ask_patiently(signed)
        except TooBusy as error:
            _log.warning("not known yet whether this server can be reached", why=str(error))
            return False
        if self._again.is_set():
            return False
        if findings is None or findings.reached:
            self._show(self.addresses if findings is None else findings.answered or self.addresses)
            if not self._node.neighbours():
                await self._node.promote()  # no other node is there to say otherwise
            return True
        anchors = findings.anchors
        if not anchors:
            _log.error(
                "this server cannot be reached from outside, and no anchor is known: start swarm-bootstrap on a public "
                "machine, forward the port, or pass --announce-address",
                addresses=list(self.addresses),
            )
            return False
        return await self._hide(anchors)

    async def news(self) -> None:
        """Wait until a server that cannot be reached is to look again: it has moved, or some time has passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.again_s):  # the operator may have forwarded the port by then
                await self._again.wait()

    async def run(self, newest: Callable[[], SignedAnnouncement | None]) -> None:
        """Look again and again how this server is reached, for ever. newest: its newest record."""
        limits = self._limits
        await asyncio.sleep(limits.first_look_s)
        while True:
            self._again.clear()
            known = (signed := newest()) is not None and await self._look(signed)
            await asyncio.sleep(limits.lost_s)
            if self._hidden and not self._traversal.moorings.anchors:
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout((limits.look_s if known else limits.again_s) - limits.lost_s):
                    await self._again.wait()

    async def watch(self) -> None:
        """Follow this machine from network to network and from sleep to sleep, and its router, for ever.

        It also does so while the server loads, and while others find out how it is reached.
        """
        async with asyncio.TaskGroup() as group:
            if self._mapped is not None:
                group.create_task(_watch_router(self._mapped, self._again))
            async for change in self._changes:
                self._moved(change)

    async def close(self) -> None:
        """Let go of the moorings."""
        if self._mooring is not None:
            self._mooring.cancel()
            await asyncio.wait((self._mooring,))

    def _moved(self, change: Change) -> None:
        """Adapt to a change. Connections that begin at an address which this machine still has are kept."""
        _log.info(
            "this machine has moved or slept",
            addresses=list(change.addresses),
            gone=list(change.gone),
            slept_s=round(change.slept_s),
        )
        if change.breaks_connections:
            self._node.renew("this machine has moved or slept")
            if self._hidden:
                self._traversal.moorings.renew()
        if self._mapped is not None:
            self._mapped.renew_soon()
        if not self._hidden and self._listening.addresses != self._own:
            self._show(self._candidates(), found=bool(self._traversal.caller.port))
        self._own = self._listening.addresses
        self.on_change()
        self._again.set()

    def _candidates(self) -> tuple[str, ...]:
        """Where others may reach this server, before any has tried: at the home router's port, and here."""
        mappings = self._mapped.mappings if self._mapped is not None else ()
        return (*(str(mapping.external) for mapping in mappings), *self._listening.addresses)

    @property
    def _outer_port(self) -> int:
        """The data port, as it is outside."""
        mappings = self._mapped.mappings if self._mapped is not None else ()
        return mappings[0].external.port if mappings else self._listening.at.port

    async def _look(self, signed: SignedAnnouncement) -> bool:
        """Adapt to the findings of other nodes. Returns whether any could try."""
        port = self._outer_port
        try:
            findings = await self._ask(signed, port, self._listening.p2p_port)
        except TooBusy:
            return False
        if findings is None or self._again.is_set():  # they are about where this server was before it moved
            return False
        if findings.p2p:
            await self._node.promote()
        else:
            self._node.demote()
        self._traversal.moorings.offer(findings.anchors)
        outside = str(Tcp(findings.outside, port)) if findings.outside else ""
        if self._hidden and outside:
            _log.info("reached from outside now", address=outside)
            await self._unhide((outside,))
        elif self._hidden and not findings.through:
            _log.warning("no other node reaches this server through its anchors", anchors=len(self.anchors))
        elif not self._hidden and not findings.reached:
            if outside:
                self._show((outside,))
                self.on_change()
            elif findings.anchors:
                await self._hide(findings.anchors)
                self.on_change()
        return True

    async def _ask(self, signed: SignedAnnouncement, data_port: int = 0, p2p_port: int = 0) -> Findings | None:
        """Return the findings of other nodes; None where none can say. Raises TooBusy."""
        if not await self._node.back():
            raise TooBusy("p2pd is being replaced")
        if not self._node.neighbours():
            _log.warning("no other node is there yet to check that this server can be reached from outside")
            return None
        try:
            return await self._ask_helpers(self._node, signed, data_port=data_port, p2p_port=p2p_port)
        except Unreachable as error:
            _log.warning("no other node could check that this server can be reached", why=str(error))
            return None

    async def _ask_patiently(self, signed: SignedAnnouncement) -> Findings | None:
        """The same, again and again while all helpers are busy, as when a whole swarm starts. Raises TooBusy."""
        for _ in range(self._limits.busy_tries - 1):
            try:
                return await self._ask(signed)
            except TooBusy:
                await asyncio.sleep(self._limits.busy_s)
        return await self._ask(signed)

    def _show(self, addresses: tuple[str, ...], found: bool = True) -> None:
        """This server is reached at these addresses. found: it takes connections there; else this is to be found."""
        self._hidden, self.addresses = False, addresses
        at = next(iter(dialable(addresses)), None)
        if at is not None and found:
            self._traversal.caller.host, self._traversal.caller.port = at.host, at.port

    async def _hide(self, anchors: tuple[ViaAnchor, ...]) -> bool:
        """No address leads here: moor, and announce anchors. Returns whether there is a mooring."""
        moorings = self._traversal.moorings
        self._hidden, self.addresses = True, ()
        self._traversal.caller.port = 0
        moorings.offer(anchors)
        if self._mooring is None:
            self._mooring = asyncio.create_task(moorings.run())
        try:
            async with asyncio.timeout(self._limits.moored_s):
                await self._moored.wait()
        except TimeoutError:
            _log.error("no anchor takes this server, which cannot be reached from outside", asked=len(anchors))
            return False
        return True

    async def _unhide(self, addresses: tuple[str, ...]) -> None:
        self._show(addresses)
        await self.close()
        self._mooring = None
        self.on_change()

    def _moorings_changed(self) -> None:
        before, self._moorings_before = self._moorings_before, len(self._traversal.moorings.anchors)
        if self._moorings_before:
            self._moored.set()
        else:
            self._moored.clear()
        if self._moorings_before < before:
            self._again.set()
        self.on_change()


async def _watch_router(mapped: Mapped, news: asyncio.Event) -> None:
    while True:
        await mapped.changed(mapped.mappings)
        news.set()
