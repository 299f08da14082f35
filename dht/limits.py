"""How much one peer, and all of them together, may ask for."""

from collections import OrderedDict

from swarm.errors import SwarmError

PEERS_MAX = 4096  # remembered buckets; the peer unseen for longest is forgotten


class TooBusy(SwarmError):
    """A request beyond the limits; the text goes back to the peer."""


class RateLimit:
    """A token bucket per peer: `rate` requests a second on average, `burst` at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # peer -> tokens, at second

    def take(self, peer: str, now: float, cost: float = 1.0) -> None:
        """Pay for one request at `now` (seconds of any steady clock). Raises TooBusy."""
        tokens, at = self._buckets.pop(peer, (self._burst, now))
        tokens = min(self._burst, tokens + max(0.0, now - at) * self._rate)
        paid = tokens >= cost
        self._buckets[peer] = (tokens - cost if paid else tokens, now)
        if len(self._buckets) > PEERS_MAX:
            self._buckets.popitem(last=False)
        if not paid:
            raise TooBusy("too many requests; slow down")
