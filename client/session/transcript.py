"""A session's answers, kept for an audit: its last outputs, and the hops that computed them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from swarm.client.planning.route import Hop
from swarm.limits import limit
from swarm.protocol.journal import Expansion, Past


@dataclass(frozen=True, slots=True)
class TranscriptLimits:
    """How much of a session is kept."""

    output_bytes: int = limit(4 << 20, "bytes", "of outputs; those of the first positions are forgotten first")


@dataclass(frozen=True, slots=True)
class Testimony:
    """The answers of a session's hops, and the positions that they were given.

    past: all positions, in order, as the client's journal has them; expansion makes activations of it, if it keeps
    token ids. outputs: as in `Transcript`. route: the hops, which were the same until then. has_moved: others took over
    after that, for whose outputs nobody could tell which of all these hops were wrong. want: outputs in the first
    answer that had any.
    """

    past: tuple[Past, ...]
    outputs: Mapping[int, Tensor]
    route: tuple[Hop, ...]
    expansion: Expansion | None = None
    has_moved: bool = False
    want: int = 1

    @property
    def rows(self) -> int:
        """Rows of the session."""
        return self.past[0].rows

    @property
    def length(self) -> int:
        """Positions of the session."""
        return self.past[-1].stop


class Transcript:
    """The outputs of one session, as long as the same hops compute it. What is rolled back is forgotten.

    When others take over, those of the first hops stay as they are then, and nothing is added: a server that leaves a
    session does not leave its audit.
    """

    def __init__(self, limits: TranscriptLimits = TranscriptLimits(), expansion: Expansion | None = None) -> None:
        """expansion: makes activations of the session's past, if that keeps token ids."""
        self._limits, self._expansion = limits, expansion
        self._route: tuple[Hop, ...] = ()
        self._has_moved = False  # other hops took over
        self._first: Testimony | None = None  # of those before them, if these told anything
        self._outputs: dict[int, Tensor] = {}  # by position, in order: [rows, hidden_size]
        self._n_bytes = 0
        self._want = 0  # outputs in the first answer that had any

    def testimony(self, past: Sequence[Past]) -> Testimony | None:
        """Return what an audit takes; None where nothing was told. past: of all that was answered until now."""
        if self._has_moved or not self._outputs:
            return self._first
        return Testimony(tuple(past), dict(self._outputs), self._route, self._expansion, want=self._want)

    def stands(self, hops: tuple[Hop, ...], past: Sequence[Past]) -> None:
        """Note the hops that compute from now on. past: of all that was answered before."""
        if not self._has_moved and past and _places(self._route) != _places(hops):
            first, self._has_moved = self.testimony(past), bool(self._route)
            self._first = first and replace(first, has_moved=True)
        self._route = hops

    def note(self, keep: int, *, gathered: bool, tokens: int, output: Tensor | None) -> None:
        """Note the answer to a step, in order. keep: positions that stayed before it. tokens: that it added.

        output: of the last positions, [rows, wanted, hidden_size]. gathered: rows have changed places, so that earlier
        outputs are of no use.
        """
        if self._has_moved:
            return
        for position in [at for at in self._outputs if gathered or at >= keep]:
            self._n_bytes -= self._outputs.pop(position).nbytes
        wanted = 0 if output is None else output.shape[1]
        self._want = self._want or wanted
        for index in range(wanted):
            assert output is not None
            told = output[:, index].clone()  # not the frame that it came in, which others' outputs share
            self._outputs[keep + tokens - wanted + index] = told
            self._n_bytes += told.nbytes
        while self._n_bytes > self._limits.output_bytes:
            self._n_bytes -= self._outputs.pop(next(iter(self._outputs))).nbytes


def _places(hops: tuple[Hop, ...]) -> list[tuple[str, object]]:
    return [(hop.process, hop.blocks) for hop in hops]
