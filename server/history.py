"""The outputs that a hop keeps of a session, their digests, and the replay that brings them to the next hops.

A replay may hold pieces of the journal that the journal itself has dropped or put together since. So while one runs,
the charge is the larger of both: the journal, and all that the replay found and later steps added.
"""

from torch import Tensor

from swarm.activations import Activations
from swarm.protocol.journal import Entry, Journal, cut_off
from swarm.protocol.messages import Rebuild, Replay, Step
from swarm.protocol.receipts import Tally
from swarm.protocol.replay import PastSender, ReplayWindow
from swarm.protocol.tensors import Coding
from swarm.server.holdings import Holdings
from swarm.server.limits import HostedLimits


class History:
    """One session's journal, its replay, and the window of pieces that the next hops have not confirmed."""

    def __init__(
        self,
        holdings: Holdings,
        limits: HostedLimits,
        *,
        keeps: bool,
        coding: Coding | None = None,
        tallies: bool = False,
    ) -> None:
        """keeps: whether there is a journal, as at all hops but the last one. coding: of all that travels.

        tallies: whether the owner will ask for a receipt.
        """
        self.coding: Coding | None = coding
        self.tally = Tally(coding, limits.receipts) if tallies else None
        self.journal: Journal | None = Journal(limits.journal) if keeps else None
        self.sender: PastSender | None = None  # of this epoch's replay, also when it is done
        self.window = ReplayWindow(limits.replay)  # of a replay, or of a past that goes on from here
        self._replayed_bytes = self._tally_bytes = 0
        self._holdings = holdings
        self._limits = limits

    def note(self, entry: Entry) -> bool:
        """Keep an output. Returns False where there is no room: then the journal must be dropped."""
        if self.journal is None:
            return True
        replayed = self._replayed_bytes + entry.past.n_bytes if self._replayed_bytes else 0
        # The journal may copy much more than the entry, so the room is taken first.
        if not self._holdings.journal(max(self.journal.n_bytes_with(entry), replayed) + self._tally_bytes):
            return False
        self._replayed_bytes = replayed
        self.journal.add(entry)
        return True

    def tell(self, message: Step | Rebuild, given: Activations, sent: Tensor | None) -> None:
        """Note what was given and what was sent on, for a receipt. Called behind the sending: no step waits for it.

        sent: outputs of the last positions, [rows, positions, hidden_size].
        """
        if self.tally is None:
            return
        if isinstance(message, Step):
            self.tally.add(message.keep, given, sent, gathered=message.rows is not None)
        else:
            self.tally.add(message.start, given, sent)
        if not self._charge_tally(self.tally.n_bytes):
            self.tally.lose("there was no room for it")
            self._charge_tally(self.tally.n_bytes)

    def _charge_tally(self, n_bytes: int) -> bool:
        """Hold so much for the tally. Returns False where there is no room; less always fits."""
        if not self._holdings.journal(self._holdings.journal_bytes - self._tally_bytes + n_bytes):
            return False
        self._tally_bytes = n_bytes
        return True

    def end(self) -> None:
        """Keep nothing any more: the session has ended."""
        self.begin_epoch()
        self.tally, self._tally_bytes = None, 0
        self.drop()

    def drop(self) -> None:
        """Keep no outputs from now on, and none of those before. A replay goes on."""
        self.journal = None
        self._holdings.journal(self._replayed_bytes + self._tally_bytes)

    def begin_anew(self) -> None:
        """Keep outputs from now on: the session has no positions yet that the journal would lack."""
        self.journal = Journal(self._limits.journal)

    def replay(self, journal: Journal, request: Replay) -> PastSender:
        """Begin to send the past that the next hops lack. journal: the session's, which it has."""
        self._replayed_bytes = journal.n_bytes
        self.window = ReplayWindow(self._limits.replay)
        pieces = journal.past_after(request.step)
        if request.stop is not None:
            pieces = cut_off(pieces, request.stop)
        limits = self._limits.replay
        self.sender = PastSender(
            request.session, request.epoch, pieces, request.hops, self.window, limits, coding=self.coding
        )
        return self.sender

    def end_replay(self) -> None:
        """Charge nothing more for the replay. It has begun in this epoch all the same."""
        if self.sender is not None:
            self._replayed_bytes = 0
            journal_bytes = 0 if self.journal is None else self.journal.n_bytes
            self._holdings.journal(journal_bytes + self._tally_bytes)

    def begin_epoch(self) -> None:
        """End the replay of the epoch before; this one may have one of its own."""
        self.end_replay()
        self.sender, self.window = None, ReplayWindow(self._limits.replay)
