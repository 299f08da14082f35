"""Relayed channels go on over direct connections, where one succeeds later (docs/reach.md).

upgrades    the side that has dialled tries again from time to time, and claims
admit       the other side lets the channel that is claimed move
"""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

import structlog

from swarm.activations import Activations
from swarm.errors import NetworkError
from swarm.limits import limit
from swarm.net.address import ViaAnchor
from swarm.net.admission import Admission, source_of
from swarm.net.calling import Caller
from swarm.net.carriers.connection import TcpCarrier
from swarm.net.carriers.movable import MovableCarrier
from swarm.net.channel import Channel
from swarm.net.endpoint import Remote
from swarm.net.gate import IDLE, PROGRESS, Toll
from swarm.net.transfer import MoveSecrets
from swarm.protocol.meeting import Claim, Claimed
from swarm.protocol.messages import AnyMessage

_log = structlog.get_logger("swarm.net")


@dataclass(frozen=True, slots=True)
class UpgradeLimits:
    """How often the end of a relayed channel that has dialled tries to reach its peer directly."""

    first_s: float = limit(5.0, "s", "before the first try")
    growth: float = limit(2.0, "times", "each wait is as long as the one before")
    most_s: float = limit(300.0, "s", "between two tries")
    jitter: float = limit(0.25, "of a wait", "by which it is longer or shorter, so that no two ends keep step")
    tries_max: int = limit(10, "tries", "then the channel stays relayed until its end")
    at_once_max: int = limit(64, "channels", "that try at one time; further ones stay relayed")
    answer_s: float = limit(5.0, "s", "a claim that is not answered by then has failed")

    def waits_s(self, rng: random.Random) -> Iterator[float]:
        """Return the seconds before each try."""
        for i in range(self.tries_max):
            wait_s = min(self.most_s, self.first_s * self.growth**i)
            yield wait_s * rng.uniform(1 - self.jitter, 1 + self.jitter)


class Upgrades:
    """The tries of one process. Lives in the event loop."""

    def __init__(self, caller: Caller, limits: UpgradeLimits, rng: random.Random | None = None) -> None:
        """rng: of the waits' jitter."""
        self._caller, self._limits, self._rng = caller, limits, rng or random.Random()  # noqa: S311 - no secret
        self._trying: set[asyncio.Task[None]] = set()

    def watch(self, channel: Channel, anchor: ViaAnchor, remote: Remote) -> None:
        """Try to move a channel that this side has dialled through an anchor, if it is relayed, until it ends."""
        movable = isinstance(channel.carrier, MovableCarrier) and channel.ready.result().moves
        if not movable or channel.closed or len(self._trying) >= self._limits.at_once_max:
            return
        task = asyncio.create_task(self._try(channel, anchor, remote))
        self._trying.add(task)
        task.add_done_callback(self._trying.discard)

    async def close(self) -> None:
        """Try no more."""
        for task in self._trying:
            task.cancel()
        await asyncio.gather(*self._trying, return_exceptions=True)

    async def _try(self, channel: Channel, anchor: ViaAnchor, remote: Remote) -> None:
        for wait_s in self._limits.waits_s(self._rng):
            await asyncio.wait((channel.ended,), timeout=wait_s)
            if channel.closed or await self._once(channel, anchor, remote):
                return

    async def _once(self, channel: Channel, anchor: ViaAnchor, remote: Remote) -> bool:
        """Reach the peer anew, and claim. Returns whether the channel has begun to move."""
        claiming = _Claiming(channel)
        try:
            fresh = await self._caller.call(anchor, remote, claiming.hear, relayed=False)
        except NetworkError as error:
            _log.debug("still relayed", peer=remote.peer, why=str(error))
            return False
        try:
            claiming.claim(fresh)
            await asyncio.wait((claiming.moves, channel.ended, fresh.ended), timeout=self._limits.answer_s,
                               return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
            return claiming.moves.done()
        except NetworkError as error:
            _log.debug("still relayed", peer=remote.peer, why=str(error))
            return False
        finally:
            if not claiming.moves.done():
                fresh.close()


class _Claiming:
    """One claim: a fresh channel of its own asks that another one goes on over its connection."""

    def __init__(self, old: Channel) -> None:
        self.moves: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._old = old
        self._secrets: MoveSecrets | None = None
        self._written = 0  # bytes of the fresh channel, the claim included

    def claim(self, fresh: Channel) -> None:
        """Send the claim. Raises ChannelClosed."""
        old, new = self._old.ready.result().exporter, fresh.ready.result().exporter
        self._secrets = MoveSecrets(old, new)
        fresh.send(Claim(channel=MoveSecrets.name(old), proof=self._secrets.proof(first=True)))
        self._written = fresh.sent_bytes + fresh.unsent_bytes

    def hear(self, fresh: Channel, message: AnyMessage, activations: Activations | None) -> Toll:
        """Take the answer: an OnMessage. The channel moves at once, before anything else is sent on the fresh one."""
        del activations
        secrets, carrier, connection = self._secrets, self._old.carrier, fresh.carrier
        if secrets is None or self.moves.done() or not isinstance(message, Claimed):
            return IDLE
        if message.proof != secrets.proof(first=False):
            return IDLE
        assert isinstance(carrier, MovableCarrier)
        assert isinstance(connection, TcpCarrier)
        if carrier.can_move and self._written == fresh.sent_bytes + fresh.unsent_bytes:
            carrier.move(connection, secrets, first=True)
            self.moves.set_result(None)
        return PROGRESS


def admit(admission: Admission[Channel], fresh: Channel, claim: Claim) -> Toll:
    """Let the channel that a peer claims go on over the connection of the fresh one that brings the claim.

    It must be a relayed channel of the same process, and the claim must be proven. Else the fresh channel ends, and
    the claim is charged.
    """
    proven, connection = fresh.ready.result(), fresh.carrier
    for channel, process in admission.proven.get(fresh.peer, {}).items():
        old, carrier = channel.ready.result().exporter, channel.carrier
        if process != proven.process_key or MoveSecrets.name(old) != claim.channel:
            continue
        secrets = MoveSecrets(old, proven.exporter)
        movable = isinstance(carrier, MovableCarrier) and carrier.can_move and not channel.closed
        straight = isinstance(connection, TcpCarrier) and connection.way != "relayed"
        if movable and straight and claim.proof == secrets.proof(first=True):
            assert isinstance(carrier, MovableCarrier)
            assert isinstance(connection, TcpCarrier)
            fresh.send(Claimed(proof=secrets.proof(first=False)))
            admission.moved(channel, source_of(connection.host))
            carrier.move(connection, secrets, first=False)
            return PROGRESS
    fresh.close()
    return IDLE
