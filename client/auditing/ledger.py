"""What a client's audits have shown of each process, and whom it leaves out for that. Pure."""

from dataclasses import dataclass, replace

from swarm.client.auditing.inquest import Verdict
from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class LedgerLimits:
    """How much a client remembers of its audits."""

    processes_max: int = limit(4096, "processes", "whose doubts are remembered; the oldest are forgotten first")
    doubts_min: int = limit(2, "doubts", "of different companies show a process that is in all of them as wrong")


@dataclass(frozen=True, slots=True)
class Audits:
    """The audits of one client so far. wrong: peer ids of servers whose outputs were wrong, in the order of finding.

    agreed: of sessions whose servers others agree with. disputed: some server was wrong. unaudited: no other server
    could be asked, or the session did not suit, because its hops had changed, say.
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
        self._doubts: dict[str, tuple[int, frozenset[str]]] = {}  # how many, and who was in all of them

    def skip(self) -> None:
        """Note a session that was drawn, and is not audited."""
        self.audits = replace(self.audits, unaudited=self.audits.unaudited + 1)

    def note(self, verdict: Verdict) -> frozenset[str]:
        """Take a verdict. Returns the processes that are known to be wrong since then."""
        audits, news = self.audits, set(verdict.wrong)
        if verdict.doubted:
            news |= self._doubt(verdict.doubted)
        for process in news | verdict.cleared:
            self._doubts.pop(process, None)
        if verdict.accuses:
            peers = [peer for peer in sorted(process.partition("/")[0] for process in news) if peer not in audits.wrong]
            self.audits = replace(audits, disputed=audits.disputed + 1, wrong=(*audits.wrong, *peers))
        elif verdict.cleared:
            self.audits = replace(audits, agreed=audits.agreed + 1)
        else:
            self.skip()
        return frozenset(news)

    def _doubt(self, company: frozenset[str]) -> set[str]:
        """Note that one of some processes was wrong. Returns those of whom that is known now."""
        found = set()
        for process in company:
            count, together = self._doubts.pop(process, (0, company))
            self._doubts[process] = count, together = count + 1, together & company
            if count >= self._limits.doubts_min and together == {process}:
                found.add(process)
        while len(self._doubts) > self._limits.processes_max:
            del self._doubts[next(iter(self._doubts))]
        return found
