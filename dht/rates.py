"""Token buckets: how much one peer may ask of this node."""

from collections import OrderedDict


class RateLimit:
    """A token bucket per peer: `rate` requests a second on average, `burst` at once."""

    def __init__(self, rate: float, burst: float, peers_max: int = 4096) -> None:
        """peers_max: buckets that are remembered; the peer unseen for longest is forgotten."""
        self._rate, self._burst, self._peers_max = rate, burst, peers_max
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # peer -> tokens, at second

    def take(self, peer: str, now: float, cost: float = 1.0) -> bool:
        """Pay for one request at `now` (seconds of any steady clock). Returns whether the peer's tokens sufficed."""
        tokens, at = self._buckets.pop(peer, (self._burst, now))
        tokens = min(self._burst, tokens + max(0.0, now - at) * self._rate)
        paid = tokens >= cost
        self._buckets[peer] = (tokens - cost if paid else tokens, now)
        if len(self._buckets) > self._peers_max:
            self._buckets.popitem(last=False)
        return paid
