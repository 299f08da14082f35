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


class Ledger:
    """The audits of one client."""

    def __init__(self, limits: LedgerLimits = LedgerLimits()) -> None:
        self.audits = Audits()
        self._limits = limits
        self._doubts: tuple[_Doubt, ...] = ()

    def skip(self) -> None:
        """Note a session that was drawn, and is not audited."""
        self.audits = replace(self.audits, unaudited=self.audits.unaudited + 1)

    def note(self, verdict: Verdict) -> frozenset[str]:
        """Take a verdict. Returns the processes that are known to be wrong since then."""
        audits, news = self.audits, set(verdict.wrong)
        self._doubts = tuple(replace(doubt, excused=doubt.excused | verdict.cleared) for doubt in self._doubts)
        if verdict.doubted:
            self._doubts = (*self._doubts, _Doubt(verdict.doubted))[-self._limits.doubts_max :]
            news |= {process for process in verdict.doubted if self._is_common(process)}
        # A doubt that a wrong server explains says nothing of the others that it meant.
        self._doubts = tuple(doubt for doubt in self._doubts if not doubt.company & news)
        if verdict.accuses:
            peers = [peer for peer in sorted(process.partition("/")[0] for process in news) if peer not in audits.wrong]
            self.audits = replace(audits, disputed=audits.disputed + 1, wrong=(*audits.wrong, *peers))
        elif verdict.cleared:
            self.audits = replace(audits, agreed=audits.agreed + 1)
        else:
            self.skip()
        return frozenset(news)

    @property
    def doubted(self) -> frozenset[str]:
        """The processes of which one or another was wrong, and with which none has agreed since."""
        return frozenset[str]().union(*(doubt.company - doubt.excused for doubt in self._doubts))

    def _is_common(self, process: str) -> bool:
        """Whether a process is the only one that is meant by all doubts that mean it, and these are enough."""
        companies = [d.company for d in self._doubts if process in d.company and process not in d.excused]
        return len(companies) > self._limits.doubts_min and frozenset.intersection(*companies) == {process}
