"""What an auditor of a swarm knows of its servers from all of its audits, and whom it audits next. Pure.

A server that is wrong at times may be right in every replay. Then an audit shows that one of its route was wrong, and
many audits show which (`swarm.client.auditing.odds`).
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import structlog

from swarm.client.auditing.edges import Edge, processes_at
from swarm.client.auditing.inquest import Verdict
from swarm.client.auditing.ledger import Doubts, Ledger
from swarm.client.auditing.odds import Observation, OddsLimits, unsteady
from swarm.limits import limit

_log = structlog.get_logger("swarm.audits")


@dataclass(frozen=True, slots=True)
class DocketLimits:
    """Whom an auditor audits, and what it remembers."""

    doubted_share: float = limit(0.5, "of draws", "are among doubted servers, if there are any; the rest among all")
    odds: OddsLimits = field(default_factory=OddsLimits)


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of one audit, by peer id. drawn: the server that it was about; "" if there was none to draw.

    why: it came to no verdict. Else drawn is in one of the three sets, unless its outputs proved nothing. took_s: of
    the audit, with all replays.
    """

    drawn: str = ""
    agreed: frozenset[str] = frozenset()
    doubted: frozenset[str] = frozenset()
    wrong: frozenset[str] = frozenset()
    why: str = ""
    took_s: float = 0.0


class Docket:
    """The audits of one auditor. ledger: which every audit's verdict is noted in before it is taken here."""

    def __init__(self, limits: DocketLimits, draws: random.Random) -> None:
        self.ledger, self._signed = Ledger(), Doubts()  # signed: of ends of edges, by receipts
        self._limits, self._draws = limits, draws
        self._observations: tuple[Observation, ...] = ()

    @property
    def doubted(self) -> frozenset[str]:
        """The ids of peers that are in doubt: one or another of them was wrong, and none has agreed with them since."""
        return peers_of(self._doubted)

    def draw(self, processes: Sequence[str]) -> str | None:
        """Draw the process that is audited next."""
        doubted = [each for each in processes if each in self._doubted]
        if doubted and self._draws.random() < self._limits.doubted_share:
            processes = doubted
        return self._draws.choice(processes) if processes else None

    def compare(self, edges: Sequence[Edge]) -> frozenset[str]:
        """Remember what hops signed. Returns the peers that all receipts together show as signing what is not so."""
        found = frozenset[str]()
        self._signed.excuse(frozenset().union(*(each.ends for each in edges if each.agrees)))
        for edge in edges:
            if not edge.agrees:
                _log.warning("hops signed different digests of one edge", peers=sorted(peers_of(edge.ends)))
                found |= self._signed.add(edge.ends)
        return peers_of(found)

    def take(self, drawn: str, verdict: Verdict) -> Findings:
        """Remember an audit. Returns its findings, with a server that all of them together show as wrong at times.

        drawn: a peer id. verdict: as it is `given` what the ledger knows.
        """
        wrong, doubted = peers_of(verdict.wrong), peers_of(verdict.suspected)
        findings = Findings(drawn, peers_of(verdict.cleared) - wrong - doubted, doubted - wrong, wrong)
        if wrong or doubted:
            _log.info("an audit disagrees", wrong=sorted(wrong), doubted=sorted(findings.doubted))
        company = peers_of(verdict.doubted) - wrong
        if findings.agreed or company:
            kept = (*self._observations, Observation(findings.agreed, company))
            self._observations = kept[-self._limits.odds.observations_max :]
        found = unsteady(self._observations, self._limits.odds) if company else None
        if found is not None:
            _log.warning("server computes wrongly at times", peer=found)
            wrong |= {found}
        self._observations = tuple(each for each in self._observations if not each.company & wrong)
        for doubts in (self.ledger.doubts, self._signed):
            doubts.explain(frozenset(each for each in doubts.doubted if peers_of({each}) <= wrong))
        left = frozenset() if found in company else findings.doubted
        return replace(findings, wrong=wrong, doubted=left, agreed=findings.agreed - wrong)

    @property
    def _doubted(self) -> frozenset[str]:
        return self.ledger.doubts.doubted | processes_at(self._signed.doubted)


def peers_of(processes: Collection[str]) -> frozenset[str]:
    """Return the ids of the peers whose processes these are."""
    return frozenset(process.partition("/")[0] for process in processes)
