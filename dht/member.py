"""A node's membership while one p2pd runs: joining, keeping up its routing table, storing and searching.

It ends with its p2pd. `swarm.dht.node` builds the next one.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog
from hivemind.p2p import PeerID

from swarm.dht.arrival import Arrival, Greeting
from swarm.dht.fetch import Reading
from swarm.dht.format import CALLS
from swarm.dht.keepers import Keepers
from swarm.dht.protocol import SwarmProtocol
from swarm.dht.records import check_clock, key_id
from swarm.dht.sampling import Sample
from swarm.dht.search import Result, Searcher
from swarm.dht.storage import RecordStorage
from swarm.dht.store import FULL
from swarm.dht.validator import Entry, OnEntries
from swarm.dht.whereabouts import Whereabouts
from swarm.errors import ClockSkew, SwarmError, Unreachable
from swarm.limits import limit
from swarm.net.p2p import Daemon, split_multiaddr

_log = structlog.get_logger("swarm.dht")


@dataclass(frozen=True, slots=True)
class MemberLimits:
    """How a node joins, and how often it looks around."""

    join_timeout_s: float = limit(13.0, "s", "with p2pd's start, an unreachable swarm is reported within 15 s")
    populate_timeout_s: float = limit(3.0, "s", "learning the neighbours while joining ends then")
    maintain_s: float = limit(15.0, "s", "neighbours are looked at, and lost initial peers called, this often")
    asked_max: int = limit(64, "nodes", "that may be gone are asked in each round")
    asked_at_once: int = limit(16, "nodes", "the same, at one time: most places for calls stay free")
    search_keys_max: int = limit(16, "keys", "in one search; more are looked up one search after the other")
    places_at_first: int = limit(3, "places", "random ones at which a new node measures the distance of others")
    places_later: int = limit(1, "places", "the same, in every later round")
    initial_peers_max: int = limit(32, "peers", "the rest of the list is ignored")


@dataclass(slots=True)
class Member:
    """One node on one p2pd. ended: p2pd has ended, or is about to be replaced, so that no failure of its calls counts.

    poll_s: within so many seconds a dead p2pd is noticed. met: nodes to call on as on initial peers; unlike these,
    none of them has to answer.
    """

    daemon: Daemon
    protocol: SwarmProtocol
    searcher: Searcher
    initial_peers: tuple[str, ...]
    storage: RecordStorage
    poll_s: float
    whereabouts: Whereabouts
    limits: MemberLimits = field(default_factory=MemberLimits)
    ended: bool = False
    met: tuple[str, ...] = ()
    keepers: Keepers = field(default_factory=Keepers)
    _arrival: Arrival = field(default_factory=Arrival)

    @property
    def lost(self) -> bool:
        """Whether p2pd has ended, even if its supervisor has not noticed it yet."""
        return self.ended or self.daemon.is_broken

    @property
    def ways_in(self) -> tuple[str, ...]:
        """The multiaddrs of the nodes to join through."""
        return (self.initial_peers + self.met)[: self.limits.initial_peers_max]

    def known(self) -> list[bytes]:
        """Return the nodes of the routing table that have answered; where none has, all."""
        return [peer.to_bytes() for peer in self.protocol.routing_table.answering()]

    async def close(self) -> None:
        """End the calls that are still under way."""
        self.ended = True
        await self.searcher.close()
        await self.whereabouts.close()
        await self._arrival.close()

    # --- storing and searching ---------------------------------------------------------------------------------------

    async def put(self, entries: Sequence[Entry]) -> list[int]:
        """Store entries (at most `CALLS.stores_max`) on their keepers. Returns how many nodes took each.

        FULL where more nodes refuse an entry than take it.
        """
        by_key: dict[bytes, list[int]] = {}
        for i, entry in enumerate(entries):
            by_key.setdefault(entry.place.key, []).append(i)
        took, refused = [0] * len(entries), [0] * len(entries)
        silent: set[bytes] = set()

        async def store_at(peer: bytes, wanted: list[int]) -> None:
            accepted = await self.protocol.store(PeerID(peer), [entries[i] for i in wanted])
            if accepted is None:
                silent.add(peer)
            for i, ok in zip(wanted, accepted or (), strict=False):
                took[i] += ok
                refused[i] += not ok

        await self._join_if_alone()
        wanted_at: dict[bytes, list[int]] = {}
        for key, peers in (await self._nearest(tuple(by_key))).items():
            for peer in peers:
                wanted_at.setdefault(peer, []).extend(by_key[key])
        async with asyncio.TaskGroup() as group:
            for peer, wanted in wanted_at.items():
                group.create_task(store_at(peer, wanted))
        for key in by_key:
            self.keepers.note(key, silent)
        await self._check_p2pd(not wanted_at or any(took))
        return [count if count >= against else FULL for count, against in zip(took, refused, strict=True)]

    async def sample(
        self, keys: Sequence[str], sample: Sample, on_entries: OnEntries | None = None
    ) -> dict[str, tuple[bytes, ...]]:
        """Read a sample of a model's records, under its first key and others. Raises Unreachable."""

        async def search(places: Sequence[bytes], salt: bytes) -> dict[bytes, Result]:
            return await self.search(places, on_entries, salt)

        (key,) = keys
        hear = on_entries or (lambda entries: None)
        reading = Reading(self.searcher, search, self.known, hear, self.limits.search_keys_max)
        results = await reading.read(key, sample)
        results[key].add(self.storage.of_model(key_id(key)))
        return {key: tuple(entry.data for entry in result.ordered()) for key, result in results.items()}

    async def search(
        self, keys: Sequence[bytes], on_entries: OnEntries | None = None, salt: bytes | None = None
    ) -> dict[bytes, Result]:
        """Ask the nodes around each key, and merge their records with those in this node's storage.

        Raises Unreachable if no node answers: that is not the same as no node holding a record. salt: of a sample.
        """
        await self._join_if_alone()
        found = await self._searched(keys, on_entries, salt)
        alone = bool(self.initial_peers) and not any(result.nodes for result in found.values())
        if alone:
            await self._join_if_alone()
            found = await self._searched(keys, on_entries, salt)
            alone = not any(result.nodes for result in found.values())
        for key, result in found.items():
            result.add(self.storage.entries(key))
        if alone and not any(result.entries for result in found.values()):
            raise Unreachable("the swarm", self.initial_peers, CALLS.find_timeout_s, "no node of the DHT answers")
        return found

    async def _nearest(self, keys: Sequence[bytes]) -> dict[bytes, tuple[bytes, ...]]:
        """Return the nodes that are to keep each key's records: as found lately, or found now.

        A search asks for the key's twin: no records travel.
        """
        now = asyncio.get_running_loop().time()
        nearest = {key: peers for key in keys if (peers := self.keepers.known(key, now))}
        twins = {_twin(key): key for key in keys if key not in nearest}
        step = self.limits.search_keys_max
        for first in range(0, len(twins), step):
            part = await self._searched(list(twins)[first : first + step])
            for twin, result in part.items():
                nearest[twins[twin]] = peers = self.searcher.keepers(result, twin)
                self.keepers.learn(twins[twin], peers, now)
        return nearest

    async def _join_if_alone(self) -> None:
        """Call the initial peers if the routing table is empty: all nodes may have been silent at the same moment."""
        if not self.known():
            await self.join(must=False)

    async def _searched(
        self, keys: Sequence[bytes], on_entries: OnEntries | None = None, salt: bytes | None = None
    ) -> dict[bytes, Result]:
        known = self.known()
        found = await self.searcher.search(keys, known, on_entries=on_entries or (lambda entries: None), salt=salt)
        await self._check_p2pd(not known or any(result.nodes for result in found.values()))
        return found

    async def _check_p2pd(self, answered: bool) -> None:
        """Raise ConnectionError if p2pd ended meanwhile. answered: a node answers; else it is given time to show."""
        if not answered and not self.ended:
            await asyncio.sleep(2 * self.poll_s)
        if self.ended:
            raise ConnectionError("p2pd ended meanwhile")

    # --- joining and staying -----------------------------------------------------------------------------------------

    async def join(self, must: bool) -> None:
        """Connect to the initial peers, check the clock, learn the neighbourhood.

        A peer that is late becomes a neighbour when it answers.

        must: raise Unreachable, if there are initial peers, or ClockSkew; else a failure is only logged.
        """
        known = self.ways_in
        if not known:
            return
        tries = await self._call_on(known)
        skews = [skew for skew in tries if isinstance(skew, float)]
        if not skews:
            if must and self.initial_peers:
                reasons = {str(failure.why) for failure in tries if isinstance(failure, Unreachable)}
                why = "; ".join(sorted(reasons))[:300]
                hint = "check the address, or name another node (--initial-peers)"
                raise Unreachable("the swarm", known, self.limits.join_timeout_s, f"{why}; {hint}" if why else hint)
            _log.warning("no initial peer answers", initial_peers=known)
            return
        try:
            check_clock(skews)
        except ClockSkew as skew:
            if must:
                raise
            _log.warning("the clock is wrong", why=str(skew))  # a running node goes on: its sessions do not need it
        await self.learn(self.limits.places_at_first)

    async def meet(self, addresses: Sequence[str]) -> None:
        """Call on more nodes, now and whenever they are lost, as on initial peers. They replace those met before."""
        self.met = tuple(addresses)
        if not self.known():
            await self.join(must=False)
        elif await self._rejoin():
            await self.learn(self.limits.places_at_first)

    async def learn(self, places: int) -> None:
        """Search for ourselves, which fills the routing table on both sides, and at random places."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.limits.populate_timeout_s):
                await self.searcher.explore(self.known(), places, _twin(self.protocol.node_id.to_bytes()))

    async def maintain(self, again: Sequence[Entry]) -> None:
        """Keep the routing table alive until cancelled. again: entries that are stored once more at first."""
        if again:
            with contextlib.suppress(ConnectionError):  # then the next p2pd's member stores them
                await self.put(again)
        while True:
            await asyncio.sleep(self.limits.maintain_s)
            try:
                await self._ask_doubtful()
                if not self.known():
                    await self.join(must=False)
                else:
                    await self._rejoin()
                    await self.learn(self.limits.places_later)
            except SwarmError as error:
                _log.warning("cannot rejoin the swarm", why=str(error))

    async def _ask_doubtful(self) -> None:
        """Ask nodes that may be gone: whoever is silent is forgotten."""
        turns = asyncio.Semaphore(self.limits.asked_at_once)

        async def ask(peer: PeerID) -> None:
            async with turns:
                await self.protocol.ping(peer)

        await asyncio.gather(*map(ask, self.protocol.routing_table.doubtful(self.limits.asked_max)))

    async def _rejoin(self) -> bool:
        """Call the initial peers that are no neighbours: one that was away would else know no node for good.

        Returns whether one of them answers.
        """
        peer_ids = self.protocol.routing_table.peer_id_to_uid
        own = self.daemon.p2p.peer_id
        lost = [
            address for address in self.ways_in if (peer := split_multiaddr(address)[0]) not in peer_ids and peer != own
        ]
        if back := any(isinstance(answer, float) for answer in await self._call_on(lost)):
            _log.info("an initial peer is back")
        return back

    async def _call_on(self, addresses: Sequence[str]) -> list[Greeting]:
        return await self._arrival.greetings(self._join_at(address) for address in addresses)

    async def _join_at(self, address: str) -> Greeting:
        """Return our clock's skew (seconds) against one initial peer, or why it cannot be reached."""
        peer, _ = split_multiaddr(address)
        pings_s = 2 * CALLS.timeout_s
        try:
            await self.daemon.connect(address, self.limits.join_timeout_s - pings_s)
        except Unreachable as error:
            return error
        # It may be busy, because many nodes start together: ask twice.
        pong = await self.protocol.ping(peer) or await self.protocol.ping(peer)
        if pong is None:
            return Unreachable("a peer", (address,), pings_s, "it is connected but does not answer")
        return pong.skew_s


def _twin(key: bytes) -> bytes:
    """Return a key beside this one, under which nothing is stored: the same nodes are near."""
    return key[:-1] + bytes([key[-1] ^ 1])
