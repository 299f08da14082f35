"""NAT traversal: one process's part in it, as a caller, as a hidden peer and as an anchor (docs/reach.md).

lines      its sealed channels to anchors
caller     reaches hidden peers
upgrades   move its relayed channels to direct connections later
anchor     brings others together, where this process listens
moorings   where this process itself is hidden
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.activations import Activations
from swarm.net.address import Address, ViaAnchor
from swarm.net.anchor import Anchor, AnchorLimits, Check
from swarm.net.calling import Caller, CallLimits
from swarm.net.carriers import tcp
from swarm.net.channel import Channel, OnMessage
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.flow import FlowControl
from swarm.net.gate import Toll
from swarm.net.halves import HalfLimits, Halves
from swarm.net.limits import DialerLimits
from swarm.net.lines import Lines
from swarm.net.listener import Listener
from swarm.net.mooring import MooringLimits, Moorings
from swarm.net.upgrades import UpgradeLimits, Upgrades, admit
from swarm.protocol.meeting import Claim
from swarm.protocol.messages import AnyMessage


@dataclass(frozen=True, slots=True)
class TraversalLimits:
    """Of each part."""

    calls: CallLimits = field(default_factory=CallLimits)
    upgrades: UpgradeLimits = field(default_factory=UpgradeLimits)
    moorings: MooringLimits = field(default_factory=MooringLimits)
    anchor: AnchorLimits = field(default_factory=AnchorLimits)
    halves: HalfLimits = field(default_factory=HalfLimits)
    dialer: DialerLimits = field(default_factory=DialerLimits)


class Traversal:
    """The ways of a process that does not listen: it reaches hidden peers, and is itself dialled by nobody."""

    def __init__(self, me: Endpoint, flow: FlowControl | None = None, limits: TraversalLimits | None = None) -> None:
        """flow: shared with the process's other channels."""
        self.lines = Lines(me)
        self._flow, self._limits = flow or FlowControl(), limits or TraversalLimits()
        self.caller = Caller(me, self.lines, flow=self._flow, limits=self._limits.calls)
        self._upgrades = Upgrades(self.caller, self._limits.upgrades)

    async def dial(self, address: Address, remote: Remote, me: Endpoint, on_message: OnMessage) -> Channel:
        """Reach a peer at an address of any kind: a `Dial` for a `Dialer`. Raises NetworkError."""
        if isinstance(address, ViaAnchor):
            channel = await self.caller.call(address, remote, on_message)
            self._upgrades.watch(channel, address, remote)
            return channel
        return await tcp.dial(address, remote, me, on_message, self._flow, self._limits.dialer)

    async def close(self) -> None:
        """End the lines to anchors, and move no channel any more."""
        await self._upgrades.close()
        await self.lines.close()


class ListeningTraversal(Traversal):
    """The ways of a process that listens: it is an anchor too, and can be moored."""

    def __init__(
        self,
        me: Endpoint,
        listener: Listener,
        check: Check,
        record: Callable[[], bytes],
        limits: TraversalLimits | None = None,
    ) -> None:
        """check: of the records of peers that moor here. record: this peer's newest signed announcement."""
        super().__init__(me, listener.flow, limits)
        self.me, self.listener = me, listener
        self.halves = Halves(self._limits.halves)
        self.anchor = Anchor(self.halves, check, self._limits.anchor)
        self.caller = Caller(me, self.lines, self.halves, self.anchor, listener.flow, self._limits.calls)
        self._upgrades = Upgrades(self.caller, self._limits.upgrades)
        self.moorings = Moorings(me, self.lines, listener, record, self._limits.moorings)
        listener.on_half = self.halves.accept

    def before(self, on_message: OnMessage) -> OnMessage:
        """Return an OnMessage that takes what concerns ways, and leaves all other messages to `on_message`."""

        def take(channel: Channel, message: AnyMessage, activations: Activations | None) -> Toll:
            if message.kind in ("moor", "call", "anchor_inquiry", "claim"):
                if isinstance(message, Claim):
                    return admit(self.listener.admission, channel, message)
                return self.anchor.take(channel, message)
            return on_message(channel, message, activations)

        return take

    async def close(self) -> None:
        """End all of it. The listener's channels are its owner's."""
        self.listener.on_half = None
        self.anchor.close()
        self.halves.close()
        await super().close()
