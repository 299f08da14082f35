"""The two ends of a channel, as values: this side, and the peer that it wants to reach."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from swarm.access import EVERYBODY, Access
from swarm.identity import Identity
from swarm.net.noise import ChannelKey


@dataclass(frozen=True, slots=True)
class Endpoint:
    """This side, as it presents itself on its channels. Its flow control is `swarm.net.flow`'s."""

    identity: Identity
    key: ChannelKey
    network: str
    access: Access = EVERYBODY
    clock: Callable[[], float] = time.perf_counter  # seconds, for round trips: uvloop's own time has steps of 1 ms
    public: bool = False  # the swarm is: loopback and private addresses are not dialled

    @property
    def psk(self) -> bytes | None:
        """The 32 bytes that a private swarm's handshakes mix in."""
        key = self.access.network_key
        return key.derive("handshake") if key is not None else None


@dataclass(frozen=True, slots=True)
class Remote:
    """The peer that an initiator wants to reach: it must prove both keys."""

    peer: str
    channel_key: bytes
