"""The least costly way through a pipeline of servers, over arrays: the arithmetic behind a route. Pure.

The state of the search is (boundary, the server that has just computed up to it), because the next trip depends on
both. It walks block by block. At boundary b, `left[b, s]` is the least cost of having computed blocks [0, b), the last
of them on s, and a server t that holds block b is entered from the cheapest of them:

    entered[b, t] = hop_ms + min over s of left[b, s] + trip(s, t)          from the client where b is 0
    left[e, t]    = min over b of entered[b, t] + (e - b) * weight[t]       where t holds [b, e)

Known trips are few, so the minimum over s is that over the known ones, or that over all others plus one default.
"""

from collections.abc import Callable

import numpy as np

from swarm.client.planning.stages import Floats, Ints, Part, Stages


class Search:
    """The least costly ways to everywhere, from the client through block after block."""

    def __init__(self, stages: Stages, limit: Ints | None = None) -> None:
        """limit: how many blocks each server may take in a row; None for any number."""
        self._stages = stages
        self._limit = np.full(len(stages.start), stages.n_blocks) if limit is None else limit
        shape = (stages.n_blocks + 1, len(stages.start))
        self.left = np.full(shape, np.inf)
        self._begun = np.full(shape, np.inf)  # entered[b, t] - b * weight[t]: comparable whatever b
        enter = _enterer(stages)
        window = _window_least(self._begun, self._limit, stages)
        for at in range(stages.n_blocks):
            holders = stages.holders[at]
            weight_ms = stages.weight_ms[holders]
            trip_ms = stages.client_ms[holders] if at == 0 else enter(self.left[at], holders)
            self._begun[at, holders] = stages.hop_ms + trip_ms - at * weight_ms
            self.left[at + 1, holders] = window(at)[holders] + (at + 1) * weight_ms

    @property
    def _arrived(self) -> Floats:
        arrived: Floats = self.left[self._stages.n_blocks] + self._stages.client_ms
        return arrived

    @property
    def least_ms(self) -> float:
        """The cost of the best way, whether or not it comes back to a server; infinite where there is none."""
        return float(self._arrived.min())

    def path(self) -> list[Part] | None:
        """Return the way through all blocks; ties fall to the servers that come first."""
        stages = self._stages
        server = int(self._arrived.argmin())
        if not np.isfinite(self.least_ms):
            return None
        parts: list[Part] = []
        stop = stages.n_blocks
        while True:
            first = max(int(stages.start[server]), stop - int(self._limit[server]))
            start = first + int(self._begun[first:stop, server].argmin())
            parts.append(Part(server, start, stop))
            if start == 0:
                return parts[::-1]
            server, stop = int((self.left[start] + self._trips_to(server)).argmin()), start

    def through(self) -> Floats:
        """Return the least cost of all ways that use each server, the way back to the client included."""
        stages = self._stages
        back = Search(stages.mirrored(), self._limit)
        blocks_left = np.arange(stages.n_blocks, -1, -1)[:, None]
        onward = back._begun[::-1] + blocks_left * stages.weight_ms  # [b, t]: from t, left at b, to the client
        window = _window_least(self._begun, self._limit, stages)
        least = np.full(len(stages.start), np.inf)
        for at in range(stages.n_blocks):
            least = np.minimum(least, window(at) + (at + 1) * stages.weight_ms + onward[at + 1])
        return least - stages.hop_ms  # both searches count it

    def _trips_to(self, server: int) -> Floats:
        trips = self._stages.trips
        ms = np.full(len(self._stages.start), trips.default_ms)
        known = slice(*np.searchsorted(trips.target, [server, server + 1]))
        ms[trips.source[known]] = trips.ms[known]
        return ms


def _enterer(stages: Stages) -> Callable[[Floats, Ints], Floats]:
    """Return a function that finds the least of left[s] + trip(s, t) over all s, for some servers t."""
    trips = stages.trips
    known = np.zeros((len(stages.start), len(stages.start)), dtype=bool)
    known[trips.source, trips.target] = True
    first_met = np.maximum(stages.start[trips.source] + 1, stages.start[trips.target])
    last_met = np.minimum(stages.stop[trips.source], stages.stop[trips.target] - 1)
    possible = first_met <= last_met  # there is a boundary where the one can follow the other
    source, target, trip_ms = trips.source[possible], trips.target[possible], trips.ms[possible]
    targets, first = np.unique(target, return_index=True)

    from_known = np.full(len(stages.start), np.inf)

    def enter(left: Floats, holders: Ints) -> Floats:
        left_yet = left.copy()
        cheapest = int(left_yet.argmin())
        entered = np.full(len(holders), left_yet[cheapest] + trips.default_ms)
        waiting = np.flatnonzero(known[cheapest, holders])  # their trip is another: for them the next cheapest, ...
        while len(waiting):
            left_yet[cheapest] = np.inf
            cheapest = int(left_yet.argmin())
            entered[waiting] = left_yet[cheapest] + trips.default_ms
            if left_yet[cheapest] == np.inf:
                break
            waiting = waiting[known[cheapest, holders[waiting]]]
        if len(targets):
            from_known[targets] = np.minimum.reduceat(left[source] + trip_ms, first)
        least: Floats = np.minimum(entered, from_known[holders])
        return least

    return enter


def _window_least(begun: Floats, limit: Ints, stages: Stages) -> Callable[[int], Floats]:
    """Return a function that finds, after block `at`, the least of the latest limit[t] rows of begun[:at + 1, t]."""
    if (limit >= stages.stop - stages.start).all():
        least = np.full(begun.shape[1], np.inf)

        def least_of_all(at: int) -> Floats:
            np.minimum(least, begun[at], out=least)
            return least

        return least_of_all
    rows = int(np.minimum(limit, stages.stop - stages.start).max())
    too_old = np.where(np.arange(rows, 0, -1)[:, None] > limit, np.inf, 0.0)  # [rows, S], the latest row last

    def least_of_latest(at: int) -> Floats:
        taken = min(rows, at + 1)
        least: Floats = (begun[at + 1 - taken : at + 1] + too_old[rows - taken :]).min(axis=0)
        return least

    return least_of_latest
