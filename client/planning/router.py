"""Plans the routes of one client from the directory as it was read lately. Runs in the client's event loop."""

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from random import Random, SystemRandom
from typing import Protocol

from swarm.blocks import Blocks
from swarm.client.planning.blind import plan_blindly
from swarm.client.planning.costs import estimated, shown_by
from swarm.client.planning.evidence import Evidence
from swarm.client.planning.explain import ExplainedRoute
from swarm.client.planning.plan import plan
from swarm.client.planning.preferences import Preferences
from swarm.client.planning.promise import Crossing, Held
from swarm.client.planning.request import Request, key_and_process
from swarm.client.planning.route import Hop, Route, process_of
from swarm.client.planning.surveys import Surveys
from swarm.dht.directory import Directory, Survey
from swarm.dht.records import SignedAnnouncement
from swarm.errors import NetworkError, NoRoute
from swarm.limits import limit
from swarm.protocol.tensors import Coding


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """How old a reading of the directory may be, and how much a router remembers."""

    survey_age_s: float = limit(10.0, "s", "a new route is planned from a reading that is no older")
    survey_fresh_s: float = limit(1.0, "s", "a younger reading counts as the present state of the directory")
    ended_s: float = limit(0.5, "s", "a repair waits for other records where it has those of ended processes alone")
    early_s: float = limit(0.1, "s", "interval at which a waiting repair tries the records that have come so far")
    rtts_max: int = limit(1024, "peers", "measured round trips that are remembered, the latest ones")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The model that routes are for. dtype: only servers that compute in it, as "float32"; None for any.

    coding: of activations.
    """

    root: str
    name: str
    n_blocks: int
    dtype: str | None
    coding: Coding | None = None


class Avoided(Protocol):
    """The failures that the client's sessions have seen."""

    @property
    def processes(self) -> tuple[str, ...]:
        """Processes to avoid now, the latest failure first."""
        ...

    def ended(self, servers: Iterable[SignedAnnouncement], wall_now: float) -> tuple[str, ...]:
        """Return further ones that have announced nothing since they failed, the latest first."""
        ...

    @property
    def cut_off(self) -> bool:
        """Whether the client itself has lost its connection."""
        ...

    @property
    def banned(self) -> frozenset[str]:
        """The ids of peers that are never taken."""
        ...


class Reading(Enum):
    """Whether a plan needs the directory."""

    NO = "the latest survey is young enough"
    BESIDE = "the plan does not wait for it; the next one may need it"
    FIRST = "the plan waits for it"


def reading_for(age_s: float, limits: RouterLimits, *, repairing: bool, fresh: bool) -> Reading:
    """Decide whether a plan reads the directory.

    A repair does not wait for it: a survey of any age is enough to try. fresh: only the present state is enough.
    """
    if fresh:
        return Reading.FIRST if age_s >= limits.survey_fresh_s else Reading.NO
    if repairing:
        return Reading.BESIDE if age_s >= limits.survey_fresh_s else Reading.NO
    return Reading.FIRST if age_s >= limits.survey_age_s else Reading.NO


class Router:
    """Plans routes through one model."""

    def __init__(
        self,
        model: Wanted,
        directory: Directory,
        avoided: Avoided,
        preferences: Preferences | None = None,
        limits: RouterLimits | None = None,
        random: Random | None = None,
    ) -> None:
        """random: draws the order of servers that cost the same; servers must not know it."""
        self.surveys = Surveys(directory, model.root, model.n_blocks)
        self.preferences = preferences or Preferences()
        self.limits = limits or RouterLimits()
        self._model = model
        self._directory = directory
        self._avoided = avoided
        self._rtts: dict[str, float] = {}  # measured, in ms, by public key
        self._random = random or SystemRandom()
        self.evidence = Evidence(salt=self._salt())

    async def plan(
        self,
        blocks: Blocks,
        avoid: Collection[str] = (),
        held: Held = (),
        fresh: bool = False,
        *,
        positions_needed: int = 0,
        draws: Random | None = None,
    ) -> Route:
        """Plan a route, or a part of one that is to be repaired. Raises NoRoute.

        held: the numeric classes of the route before; a repair stays in their tier, and in them if it can.
        avoid: peers and processes that are never taken. Those that failed lately are taken if no others are left.
        fresh: read the directory first. A repair reads it beside the plan otherwise, a new route if it is old.
        draws: of a route that is drawn at random, whatever servers claim (`blind`).
        """
        request = self._request(blocks, avoid, held, positions_needed)
        repairing = bool(held)
        # A client that is cut off cannot read the directory either, and would wait long to find that out.
        fresh = fresh and not (repairing and self._avoided.cut_off)
        reading = reading_for(self.surveys.age_s, self.limits, repairing=repairing, fresh=fresh)
        if reading is not Reading.FIRST:
            if reading is Reading.BESIDE:
                self.surveys.begin()
            return await self._without_ended(self._planned(request, self.surveys.known(), draws), request, draws)
        try:
            looking = self.surveys.begin()
            if repairing and (found := await self._found_early(request, looking, draws)) is not None:
                return found
            survey = await asyncio.shield(looking)
        except NetworkError as error:
            if not self.surveys.latest.servers and not repairing:
                raise
            return self._planned_unread(request, error, draws)
        return self._planned(request, survey, draws)

    async def _without_ended(self, found: Route, request: Request, draws: Random | None) -> Route:
        """Return another route for one of processes that seem to have ended, if the look-up under way soon brings one.

        Each of them may take seconds to be told from a live one.
        """
        now = asyncio.get_running_loop().time
        until = now() + self.limits.ended_s
        while (looking := self.surveys.looking) is not None and (left_s := until - now()) > 0:
            ended = self._avoided.ended(self.surveys.latest.servers, self._directory.now())
            if not any(hop.process in ended for hop in found.hops):
                break
            heard = self.surveys.n_heard
            await asyncio.wait({looking}, timeout=min(left_s, self.limits.early_s))
            if looking.done() or self.surveys.n_heard != heard:
                found = self._planned(request, self.surveys.known(), draws)
        return found

    async def _found_early(
        self, request: Request, looking: "asyncio.Task[Survey]", draws: Random | None
    ) -> Route | None:
        """Plan with the records of a look-up as soon as they suffice: the last nodes to answer may be dead."""
        tried = 0
        while not looking.done():
            await asyncio.wait({looking}, timeout=self.limits.early_s)
            if looking.done() or self.surveys.n_heard == tried:
                continue
            tried = self.surveys.n_heard
            with contextlib.suppress(NoRoute):
                return self._planned(request, self.surveys.known(), draws)
        return None

    def _planned_unread(self, request: Request, unread: NetworkError, draws: Random | None) -> Route:
        """Plan with the latest survey, because the directory cannot be read."""
        try:
            return self._planned(request, self.surveys.latest, draws)
        except NoRoute as failure:
            why = f"{failure.why}; the directory cannot be read now ({unread})"
            raise NoRoute(failure.model, failure.missing, why, failure.passing) from None

    def _planned(self, request: Request, survey: Survey, draws: Random | None) -> Route:
        """Plan without the processes that failed lately; if that fails, without as many of the latest as possible."""
        lately = [process for process in self._left_out(survey) if process not in request.avoid]

        def without(count: int) -> Route:
            asked = replace(request, servers=survey.servers, avoid={*request.avoid, *lately[:count]})
            return plan(asked) if draws is None else plan_blindly(asked, draws)

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

    def _left_out(self, survey: Survey) -> tuple[str, ...]:
        """Return the processes that failed lately, and those that seem to have ended."""
        return *self._avoided.processes, *self._avoided.ended(survey.servers, self._directory.now())

    def renewed(self, hop: Hop) -> Hop:
        """Return the hop with the newest record of its process in the latest survey: sessions outlive records."""
        blocks = hop.announcement.blocks  # a process that moves announces others, too; none changes its class
        known = (
            each
            for each in self.surveys.latest.servers
            if process_of(each.announcement) == hop.process
            and each.announcement.blocks == blocks
            and each.announcement.numeric_class == hop.numeric_class
        )
        newest = max(known, key=lambda each: each.announcement.issued, default=hop.signed)
        return replace(hop, signed=newest) if newest.announcement.issued > hop.announcement.issued else hop

    def explained(self, hops: Sequence[Hop], crossings: tuple[Crossing, ...] = ()) -> ExplainedRoute:
        """Return hops as a route that compares itself with the servers that are known now.

        crossings: the repairs of its session that brought blocks into another numeric class.
        """
        self.remember(hops)
        survey = self.surveys.latest
        avoid = set(self._left_out(survey)) - {hop.process for hop in hops}
        request = self._request(Blocks(hops[0].blocks.start, hops[-1].blocks.stop), avoid)
        request = replace(request, servers=survey.servers)
        return ExplainedRoute.of(estimated(hops, request), request, crossings)

    def remember(self, hops: Sequence[Hop]) -> None:
        """Keep measured round trips for the next plan, the latest ones."""
        for hop in hops:
            if hop.latency_ms is not None:
                self._rtts.pop(hop.announcement.public_key, None)
                self._rtts[hop.announcement.public_key] = hop.latency_ms
        while len(self._rtts) > self.limits.rtts_max:
            del self._rtts[next(iter(self._rtts))]

    def used(self, hops: Sequence[Hop], token_ms: float) -> None:
        """Learn from a session. token_ms: the median time of one token around its route."""
        self.remember(hops)
        request = self._request(Blocks(hops[0].blocks.start, hops[-1].blocks.stop), ())
        self.evidence = self.evidence.used(shown_by(hops, token_ms, request), self._salt())

    def audited(self, right: Collection[str], blamed: Collection[str]) -> None:
        """Learn from an audit: processes whose outputs were right, and those that are wrong or may be."""
        keys = (map(key_and_process, sorted(processes)) for processes in (right, blamed))
        self.evidence = self.evidence.audited(*keys)

    async def diagnosed(self, failure: NoRoute) -> NoRoute:
        """Add to a failure: records of other files under this name, and servers of another protocol, if there are any.

        Records of other files are claims: they explain a failure, and never are one.
        """
        name, why, survey = self._model.name, failure.why, self.surveys.latest
        if not survey.servers:
            with contextlib.suppress(NetworkError):
                others = [entry.root for entry in await self._directory.models(name) if entry.root != self._model.root]
                if others:
                    why += f"; the files here have root {self._model.root}, others announce root {others[0]} under this"
                    why += " name: if those are the ones that you want, get the same revision"
        if self._avoided.banned:
            why += f"; {len(self._avoided.banned)} peers were left out, whose outputs others contradict"
        if survey.other_protocols:
            why = f"{why}; servers of protocol {survey.other_protocols} were left out"
        return NoRoute(name, failure.missing, why)

    def _request(self, blocks: Blocks, avoid: Collection[str], held: Held = (), positions_needed: int = 0) -> Request:
        return Request(
            model=self._model.name,
            wanted=blocks,
            servers=(),
            dtype=self._model.dtype,
            coding=self._model.coding,
            held=held,
            avoid={*avoid, *self._avoided.banned},
            preferences=self.preferences,
            client_rtts=dict(self._rtts),
            positions_needed=positions_needed,
            evidence=self.evidence,
        )

    def _salt(self) -> bytes:
        return self._random.randbytes(16)
