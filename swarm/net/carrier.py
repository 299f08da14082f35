"""What a channel needs below it. `swarm.net.carriers` has the kinds that there are."""

from typing import Protocol


class Carrier(Protocol):
    """What a channel needs below it: an ordered stream of bytes. TCP today; a libp2p stream fits as well."""

    def write(self, data: bytes, /) -> None:
        """Queue bytes for the other side."""
        ...

    def unsent_bytes(self) -> int:
        """Return how much is queued and not yet taken by the network."""
        ...

    def close(self) -> None:
        """Send what is queued, as far as the peer reads it soon, then end. Calls `Channel.lost` when it has ended."""
        ...

    def abort(self) -> None:
        """End at once, whatever is queued."""
        ...

    def pause_reading(self) -> None:
        """Take nothing from the network for now, so that the other side must wait. Again is fine."""
        ...

    def resume_reading(self) -> None:
        """Go on."""
        ...
