"""What a client's audits have shown of each process, and whom it leaves out for that. Pure."""

from dataclasses import dataclass, replace

from swarm.client.auditing.inquest import Verdict
from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class LedgerLimits:
    """How much a client remembers of its audits."""

    doubts_max: int = limit(256, "doubts", "that are remembered, with all whom each meant; the oldest go first")
    doubts_min: int = limit(
        2, "doubts", "of different companies; one more shows a process that is in all of them as wrong"
    )


@dataclass(frozen=True, slots=True)
class _Doubt:
    """One of a company was wrong. excused: those of them that others agreed with since."""

    company: frozenset[str]
    excused: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Audits:
    """The audits of one client so far. wrong: peer ids of servers whose outputs were wrong, in the order of finding.

    agreed: of sessions whose servers others agree with. disputed: some server was wrong. unaudited: no other server
    could be asked, or the session did not suit, because it was too long, say.
    """

    agreed: int = 0
    disputed: int = 0
    unaudited: int = 0
    wrong: tuple[str, ...] = ()


class Doubts:
    """Companies of which one member was wrong. Enough of them show which member it was."""

    def __init__(self, limits: LedgerLimits = LedgerLimits()) -> None:
        self._limits = limits
        self._doubts: tuple[_Doubt, ...] = ()

    @property
    def doubted(self) -> frozenset[str]:
        """The members of which one or another was wrong, and with which no other one has agreed since."""
        return frozenset[str]().union(*(doubt.company - doubt.excused for doubt in self._doubts))

    def excuse(self, cleared: frozenset[str]) -> None:
        """Note that others agree with these."""
        self._doubts = tuple(replace(doubt, excused=doubt.excused | cleared) for doubt in self._doubts)

    def add(self, company: frozenset[str]) -> frozenset[str]:
        """Note that one of a company was wrong. Returns those that are shown as wrong by that."""
        self._doubts = (*self._doubts, _Doubt(company))[-self._limits.doubts_max :]
        shown = frozenset(member for member in company if self._is_common(member))
        self.explain(shown)
        return shown

    def explain(self, wrong: frozenset[str]) -> None:
        """Forget all doubts of these, which are wrong: they say nothing of the others that they meant."""
        self._doubts = tuple(doubt for doubt in self._doubts if not doubt.company & wrong)

    def _is_common(self, member: str) -> bool:
        """Whether it is the only one that is meant by all doubts that mean it, and these are enough."""
        companies = [d.company for d in self._doubts if member in d.company and member not in d.excused]
        return len(companies) > self._limits.doubts_min and frozenset.intersection(*companies) == {member}


class Ledger:
    """The audits of one client. doubts: of processes."""

    def __init__(self, limits: LedgerLimits = LedgerLimits()) -> None:
        self.audits = Audits()
        self.doubts = Doubts(limits)

    def skip(self) -> None:
        """Note a session that was drawn, and is not audited."""
        self.audits = replace(self.audits, unaudited=self.audits.unaudited + 1)

    def note(self, verdict: Verdict) -> frozenset[str]:
        """Take a verdict. Returns the processes that are known to be wrong since then."""
        audits, news = self.audits, verdict.wrong
        self.doubts.excuse(verdict.cleared)
        if verdict.doubted:
            news |= self.doubts.add(verdict.doubted)
        self.doubts.explain(news)
        if verdict.accuses:
            peers = [peer for peer in sorted(process.partition("/")[0] for process in news) if peer not in audits.wrong]
            self.audits = replace(audits, disputed=audits.disputed + 1, wrong=(*audits.wrong, *peers))
        elif verdict.cleared:
            self.audits = replace(audits, agreed=audits.agreed + 1)
        else:
            self.skip()
        return news
