"""The seam below a channel. `swarm.net.carriers` has the kinds that there are."""

from typing import Protocol


class Carrier(Protocol):
    """An ordered stream of bytes below a channel."""

    way: str
    """How its ends have met: "direct", "reverse", "punched" or "relayed" (docs/reach.md)."""

    host: str
    """From where it comes, as this side sees it: a literal address."""

    def write(self, data: bytes, /) -> None:
        """Queue bytes for the other side."""
        ...

    def unsent_bytes(self) -> int:
        """Return how much is queued and not yet taken by the network."""
        ...

    def close(self) -> None:
        """Send the queued bytes, as far as the peer reads them soon, then end, and call `Channel.lost`."""
        ...

    def abort(self) -> None:
        """End at once and drop the queued bytes."""
        ...

    def pause_reading(self) -> None:
        """Take nothing from the network for now, so that the other side must wait. Again is fine."""
        ...

    def resume_reading(self) -> None:
        """Go on."""
        ...
