"""Which of many servers is wrong at times, from audits that disagreed and could not say who it was. Pure.

Let q be the chance with which a server is wrong in an audit, each by itself. An audit that agrees has the likelihood
prod(1 - q) over its servers. One that disagrees, because of one or another of a company, has 1 - prod(1 - q) over that
company. A server is found if the best q of all servers make the audits much likelier than the best q with its own at 0:
then the others, however wrong they may be, explain the audits badly. That is a likelihood-ratio test. In ln(1 - q) the
logarithm is concave, so expectation-maximisation climbs to the one best fit.

Servers are not wrong each by itself if one lies only beside a certain other one. It agrees beside all others, so the
fit blames the other one. So a server is tested only if some of its companies are without each other server that it was
in doubt with. Several servers that are wrong only beside the same honest one can still have that one found.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class Observation:
    """An audit. right: peers that computed the same. company: one or another of these did not; empty if all did."""

    right: frozenset[str]
    company: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class OddsLimits:
    """How much is remembered, and how sure a finding is."""

    observations_max: int = limit(512, "audits", "that are remembered; the oldest go first")
    disputes_min: int = limit(4, "audits", "doubt a server, and as many without each other one, before it is tested")
    candidates_max: int = limit(3, "servers", "tested after an audit, those of most disputes")
    log_odds_min: float = limit(10.0, "", "ln of the ratio of likelihoods, 22,000 to 1; with less nothing is found")
    rounds_max: int = limit(200, "rounds", "of fitting; then the fit counts as it is")
    gain_min: float = limit(1e-4, "", "a round of fitting that gains less is the last one")


def unsteady(observations: Sequence[Observation], limits: OddsLimits = OddsLimits()) -> str | None:
    """Return the peer that is wrong at times beyond doubt; None if there is none yet."""
    disputes = Counter(peer for each in observations for peer in each.company)
    often = (peer for peer, count in disputes.most_common() if count >= limits.disputes_min)
    candidates = list(islice((peer for peer in often if _is_apart(peer, observations, limits)), limits.candidates_max))
    if not candidates:
        return None
    best = _fitted(observations, None, limits)
    odds = {peer: best - _fitted(observations, peer, limits) for peer in candidates}
    found = max(odds, key=lambda peer: odds[peer])
    return found if odds[found] >= limits.log_odds_min else None


def _is_apart(peer: str, observations: Sequence[Observation], limits: OddsLimits) -> bool:
    """Whether enough audits have this peer in doubt without any certain other one."""
    companies = [each.company for each in observations if peer in each.company]
    together = Counter(other for company in companies for other in company - {peer})
    return all(len(companies) - count >= limits.disputes_min for count in together.values())


def _fitted(observations: Sequence[Observation], innocent: str | None, limits: OddsLimits) -> float:
    """Return the logarithm of the greatest likelihood. innocent: a peer that is never wrong."""
    audits = Counter(peer for each in observations for peer in each.right | each.company)
    suspects = {peer for each in observations for peer in each.company} - {innocent}
    chance = dict.fromkeys(suspects, 0.2)
    before = -math.inf
    for _ in range(limits.rounds_max):
        blame: defaultdict[str, float] = defaultdict(float)
        likelihood = 0.0
        for each in observations:
            likelihood += sum(math.log1p(-chance[peer]) for peer in each.right if peer in chance)
            if each.company:
                wrong = 1.0 - math.prod(1.0 - chance.get(peer, 0.0) for peer in each.company)
                if wrong <= 0.0:
                    return -math.inf  # only the innocent one was there
                likelihood += math.log(wrong)
                for peer in each.company & suspects:
                    blame[peer] += chance[peer] / wrong
        if likelihood - before < limits.gain_min:
            break
        before = likelihood
        chance = {peer: min(blame[peer] / audits[peer], 1.0 - 1e-9) for peer in suspects}
    return before
