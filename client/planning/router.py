"""Where sessions get their routes from: the directory as it was looked up lately. Runs in the client's event loop."""

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

from swarm.blocks import Blocks
from swarm.client.planning.explain import Optimize
from swarm.client.planning.route import Hop, Request, Route, Trusted, plan_request
from swarm.client.session.plan import SessionPlan
from swarm.client.session.session import Session
from swarm.client.session.sessions import Sessions
from swarm.dht.directory import Directory, Survey
from swarm.dht.validator import Entry
from swarm.errors import BadConfiguration, NetworkError, NoRoute, RootMismatch
from swarm.identity import public_key_of

DIRECTORY_AGE_S = 10.0  # a look-up is used again for so long
NOW_S = 1.0  # what was read so short a time ago is what the directory says now
EARLY_S = 0.1  # how often a repair that waits for a look-up tries what that has brought so far
RTTS_MAX = 1024  # measured round trips that are remembered


@dataclass(frozen=True, slots=True)
class Wanted:
    """The model that routes are for. dtype: that of the client's ends, as "float32"."""

    root: str
    name: str
    n_blocks: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Preferences:
    """Which peers may be used, None for all, and which not: by all routes and all repairs. What routes are best at."""

    allowed_peers: frozenset[str] | None = None
    blocked_peers: frozenset[str] = frozenset()
    optimize: Optimize = "latency"
    trusted_peers: Trusted = ()

    @classmethod
    def checked(
        cls,
        allowed_peers: Iterable[str] | None,
        blocked_peers: Iterable[str],
        optimize: str,
        trusted_peers: Mapping[str, Iterable[str]] | None = None,
    ) -> "Preferences":
        """Take what a user passes. Raises BadConfiguration or BadBlocks."""
        modes: tuple[Optimize, ...] = get_args(Optimize)
        mode = next((mode for mode in modes if mode == optimize), None)
        if mode is None:
            raise BadConfiguration("optimize", f"{optimize!r} is neither {' nor '.join(map(repr, modes))}")
        allowed = None if allowed_peers is None else _peer_ids("allowed_peers", allowed_peers)
        if allowed is not None and not allowed:
            raise BadConfiguration("allowed_peers", "it is empty: name peers, or pass None to allow all")
        trusted = []
        for text, peers in (trusted_peers or {}).items():
            name = f"trusted_peers[{str(text)!r}]"
            trusted.append((Blocks.parse(str(text)), _peer_ids(name, peers)))
            if not trusted[-1][1]:
                raise BadConfiguration(name, "it is empty: name peers, or leave the range out")
        return cls(allowed, _peer_ids("blocked_peers", blocked_peers), mode, tuple(trusted))


ANY_PEER = Preferences()


def _peer_ids(name: str, given: Iterable[str]) -> frozenset[str]:
    if isinstance(given, str):
        raise BadConfiguration(name, "pass a list of peer ids, not one string")
    peers = list(given)
    for peer in peers:
        try:
            public_key_of(peer)
        except (ValueError, TypeError, AttributeError):
            raise BadConfiguration(name, f"{peer!r} is not the peer id of a server, such as 12D3KooW...") from None
    return frozenset(peers)


class Router:
    """Plans routes through one model and opens sessions along them."""

    def __init__(
        self, model: Wanted, directory: Directory, sessions: Sessions, preferences: Preferences = ANY_PEER
    ) -> None:
        self._model = model
        self._preferences = preferences
        self._rtts: dict[str, float] = {}  # measured, in ms, by public key
        self._directory = directory
        self._sessions = sessions
        self._looked_up = (float("-inf"), Survey((), ()))
        self._looking: asyncio.Task[Survey] | None = None
        self._heard: dict[bytes, Entry] = {}  # by the look-up that is going on

    async def open(self, blocks: Blocks, plan: SessionPlan) -> Session:
        """Open a session along the best route through `blocks`. Raises NoRoute, RootMismatch, HopFailed or Refused."""
        planner = partial(self.plan, positions_needed=plan.batch * plan.positions_soon)
        try:
            session = await self._sessions.open(plan, blocks, planner)
        except NoRoute as nobody:  # asked for only now: somebody may come while a session waits
            raise await self._why_not(nobody) from None
        self._remember(session.route)
        return session

    async def plan(
        self,
        blocks: Blocks,
        avoid: Collection[str] = (),
        numeric_class: str | None = None,
        fresh: bool = False,
        *,
        positions_needed: int = 0,
    ) -> Route:
        """Plan a route, or a part of one that is to be repaired: then in its numeric class. Raises NoRoute.

        avoid: peers and processes that are out of the question. Those that failed lately are taken if nobody else is.
        fresh: from what the directory says now. Otherwise what it said before is enough, for a repair however long ago.
        """
        request = self._request(blocks, avoid, numeric_class, positions_needed)
        looked_up_at, survey = self._looked_up
        repairing = numeric_class is not None
        age_s = asyncio.get_running_loop().time() - looked_up_at
        unread: NetworkError | None = None
        if fresh and repairing and self._sessions.avoidance.cut_off:
            fresh = False  # it cannot be read either, and finding that out takes long
        if age_s >= NOW_S if fresh else not repairing and age_s >= DIRECTORY_AGE_S:
            try:
                looking = self._look_up_soon()
                if repairing and (found := await self._found_early(request, looking)) is not None:
                    return found
                survey = await asyncio.shield(looking)
            except NetworkError as error:
                if not survey.servers and not repairing:
                    raise
                unread = error  # what was read before may do
        elif repairing and age_s >= NOW_S:
            self._look_up_soon()  # perhaps somebody else has come, for whom the next try need not wait then
        try:
            return self._planned(request, survey)
        except NoRoute as nobody:
            if unread is not None:
                why = f"{nobody.why}; the directory cannot be read now ({unread})"
                raise NoRoute(nobody.model, nobody.missing, why) from None
            raise

    async def _found_early(self, request: Request, looking: asyncio.Task[Survey]) -> Route | None:
        """Plan with what a look-up brings as soon as that suffices: the last nodes to answer may be dead."""
        tried = 0
        while not looking.done():
            await asyncio.wait({looking}, timeout=EARLY_S)
            if looking.done() or len(self._heard) == tried:
                continue
            tried = len(self._heard)
            at, known = self._looked_up
            survey = self._directory.updated(known, self._model.root, self._model.n_blocks, self._heard.values())
            with contextlib.suppress(NoRoute):
                found = self._planned(request, survey)
                self._looked_up = at, survey
                return found
        return None

    def _planned(self, request: Request, survey: Survey) -> Route:
        """Plan without those that failed lately; if that cannot be, without as many of the latest as can be."""
        lately = [process for process in self._sessions.avoidance.processes if process not in request.avoid]

        def without(count: int) -> Route:
            avoid = {*request.avoid, *lately[:count]}
            return plan_request(replace(request, servers=survey.servers, avoid=avoid))

        least, most = 0, len(lately)
        if most:
            with contextlib.suppress(NoRoute):
                return without(most)
        found = without(least)
        while most - least > 1:  # without `most` there is no route, without `least` there is
            count = (least + most) // 2
            try:
                found, least = without(count), count
            except NoRoute:
                most = count
        return found

    def explained(self, hops: Sequence[Hop]) -> Route:
        """Return a session's hops as a route that compares itself with the servers that are known now."""
        self._remember(hops)
        used = {hop.process for hop in hops}
        avoid = set(self._sessions.avoidance.processes) - used
        blocks = Blocks(hops[0].blocks.start, hops[-1].blocks.stop)
        return Route(hops, replace(self._request(blocks, avoid), servers=self._looked_up[1].servers))

    def _request(
        self, blocks: Blocks, avoid: Collection[str], numeric_class: str | None = None, positions_needed: int = 0
    ) -> Request:
        return Request(
            model=self._model.name,
            wanted=blocks,
            servers=(),
            dtype=self._model.dtype,
            numeric_class=numeric_class,
            avoid=avoid,
            allowed_peers=self._preferences.allowed_peers,
            blocked_peers=self._preferences.blocked_peers,
            trusted_peers=self._preferences.trusted_peers,
            client_rtts=dict(self._rtts),
            positions_needed=positions_needed,
            optimize=self._preferences.optimize,
        )

    def _remember(self, hops: Sequence[Hop]) -> None:
        """Keep measured round trips for the next plan, the latest ones."""
        for hop in hops:
            if hop.latency_ms is not None:
                self._rtts.pop(hop.announcement.public_key, None)
                self._rtts[hop.announcement.public_key] = hop.latency_ms
        while len(self._rtts) > RTTS_MAX:
            del self._rtts[next(iter(self._rtts))]

    async def keep_fresh(self) -> None:
        """Look the servers up again and again while sessions are open: a repair must not have to wait for the DHT."""
        while True:
            await asyncio.sleep(DIRECTORY_AGE_S)
            if self._sessions.any_open:
                with contextlib.suppress(NetworkError):
                    await self._look_up()

    async def _look_up(self) -> Survey:
        """Read the directory; whoever asks meanwhile gets the same answer."""
        return await asyncio.shield(self._look_up_soon())

    def _look_up_soon(self) -> asyncio.Task[Survey]:
        """Begin to read the directory, if nobody has."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_up_now())
            self._looking.add_done_callback(lambda done: done.cancelled() or done.exception())  # may end unobserved
        return self._looking

    async def _look_up_now(self) -> Survey:
        self._heard = {}
        survey = await self._directory.survey(self._model.root, self._model.n_blocks, self._hear)
        self._looked_up = (asyncio.get_running_loop().time(), survey)
        return survey

    def _hear(self, entries: Sequence[Entry]) -> None:
        self._heard |= {entry.data: entry for entry in entries}

    async def _why_not(self, nobody: NoRoute) -> NoRoute | RootMismatch:
        """Say more, if it can be found out: others serve a model of this name, or speak another protocol."""
        name, why, survey = self._model.name, nobody.why, self._looked_up[1]
        if not survey.servers:
            with contextlib.suppress(NetworkError):
                for entry in await self._directory.models(name):
                    if entry.root != self._model.root:
                        return RootMismatch(name, entry.root, self._model.root)
        if survey.other_protocols:
            why = f"{why}; servers of protocol {survey.other_protocols} were left out"
        return NoRoute(name, nobody.missing, why)
