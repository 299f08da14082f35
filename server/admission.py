"""Which sessions a server opens: while it does not drain, under a name that is free, with room that will last."""

from collections.abc import Callable

from swarm.dht.records import Announcement
from swarm.net.channel import Channel
from swarm.protocol.attest import Attest, Attested
from swarm.protocol.messages import Open, Reroute
from swarm.protocol.naming import is_name_of
from swarm.server.accounts import Accounts
from swarm.server.holdings import Holdings, Memory
from swarm.server.hosting import Hosting
from swarm.server.limits import HandlerLimits
from swarm.server.prefixes import Prefixes
from swarm.server.receipts import attested
from swarm.server.refusals import Declined
from swarm.server.registry import Registry
from swarm.server.session import HostedSession


class Admission:
    """Decides about every Open."""

    def __init__(
        self,
        hosting: Hosting,
        memory: Memory,
        accounts: Accounts,
        registry: Registry,
        limits: HandlerLimits,
        wall_clock: Callable[[], float],
    ) -> None:
        """wall_clock: seconds since 1970, for the records that clients pass on."""
        self.draining = False
        self.prefixes = Prefixes(memory, limits.prefixes)
        self._hosting = hosting
        self._memory = memory
        self._accounts = accounts
        self._registry = registry
        self._limits = limits
        self._wall_clock = wall_clock

    def admit(self, channel: Channel, request: Open, now: float) -> HostedSession | Declined:
        """Check a request and make its session. now: the loop's time, seconds."""
        if self.draining:
            return Declined("draining", "this server is leaving")
        before = self._registry.sessions.get(request.session)
        if before is not None and before.owner.peer != channel.peer and is_name_of(channel.peer, request.session):
            self._registry.fail(before, None, "its name is another peer's")  # the peer had seen it on some route
            before = None
        declined = (
            self._taken(channel.peer, request, before)
            or (self._too_many(channel.peer) if before is None else None)
            or self._accounts.charge_opening(channel.peer, now)
        )
        if declined is not None:
            return declined
        part = self._hosting.part(request)
        if isinstance(part, Declined):
            return part
        if (declined := self._no_room_soon(channel.peer, request)) is not None:
            return declined
        holdings = Holdings(self._memory, request, channel.peer, self._limits.session.retry_after_s)
        return HostedSession(request, channel, part, holdings, self._limits.session, now)

    def attested(self, session: HostedSession, request: Attest) -> Attested:
        """Answer the owner of a session that asks for its receipt."""
        return attested(self._hosting, session, request, self._wall_clock())

    def following(self, request: Open | Reroute, session: HostedSession) -> Announcement | Declined | None:
        """Read the record of the next hop, which must begin where the session's blocks stop; None if there is none."""
        late_s, stop = self._limits.session.next_record_late_s, session.span.blocks.stop
        return self._hosting.following(request, stop, session.history.coding, self._wall_clock(), late_s)

    def _taken(self, peer: str, request: Open, before: HostedSession | None) -> Declined | None:
        """Only the owner opens a name anew, for a later route: as after a connection that this side takes for alive."""
        if before is None or (before.owner.peer == peer and before.seat.epoch < request.epoch):
            return None
        return Declined("not_yours", "there is a session of this name")

    def _too_many(self, peer: str) -> Declined | None:
        limits, gateway = self._limits.admission, self._limits.gateways.get(peer)
        free = limits.sessions_max - len(self._registry.sessions)
        most = free // limits.sessions_share if gateway is None else min(gateway.sessions, free)
        if len(self._registry.of(peer)) < most:
            return None
        retry_after_s = self._limits.session.retry_after_s
        return Declined("no_room", f"at most {most} sessions a peer, as many as there are now", retry_after_s)

    def _no_room_soon(self, peer: str, request: Open) -> Declined | None:
        """Refuse a session that will soon find no room, before it holds any: two that each lack some wait for ever.

        Nothing is set aside, since that would be free. But the room that a peer's own sessions are still to take is not
        there for its next one.
        """
        mine = {session.id: session.holdings for session in self._registry.of(peer)}
        replaced = mine.pop(request.session, None)
        free = self._memory.cache.free(peer) - sum(holdings.still_expected for holdings in mine.values())
        if replaced is not None:
            free += replaced.cache_tokens
        needed = self._memory.prices.tokens(request.batch, request.positions_soon, request.rollback_max)
        alone = not mine and free >= self._memory.cache.most  # a session that has all of it to itself may try
        if needed <= free or alone:
            return None
        retry_after_s = self._limits.session.retry_after_s
        return Declined("no_room", f"{needed} more tokens are likely not to fit, {max(0, free)} do", retry_after_s)
