"""A session's answers, kept for an audit: its last outputs, and the hops that computed them."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from swarm.client.planning.route import Hop
from swarm.limits import limit
from swarm.protocol.journal import Expansion, Past


@dataclass(frozen=True, slots=True)
class TranscriptLimits:
    """How much of a session is kept."""

    output_bytes: int = limit(4 << 20, "bytes", "of outputs; those of the first positions are forgotten first")


class Transcript:
    """The outputs of one session as it is now. What is rolled back is forgotten."""

    def __init__(self, limits: TranscriptLimits = TranscriptLimits()) -> None:
        self.route: tuple[Hop, ...] = ()
        self.has_moved = False  # other hops took part, too: an audit could not tell which of all were wrong
        self._limits = limits
        self._outputs: dict[int, Tensor] = {}  # by position, in order: [rows, hidden_size]
        self._n_bytes = 0

    @property
    def outputs(self) -> Mapping[int, Tensor]:
        """The outputs by their positions, in order, each [rows, hidden_size]."""
        return self._outputs

    def stands(self, hops: tuple[Hop, ...]) -> None:
        """Note the hops that compute from now on."""
        self.has_moved = self.has_moved or (bool(self.route) and _places(self.route) != _places(hops))
        self.route = hops

    def note(self, keep: int, *, gathered: bool, tokens: int, output: Tensor | None) -> None:
        """Note the answer to a step, in order. keep: positions that stayed before it. tokens: that it added.

        output: of the last positions, [rows, wanted, hidden_size]. gathered: rows have changed places, so that earlier
        outputs are of no use.
        """
        for position in [at for at in self._outputs if gathered or at >= keep]:
            self._n_bytes -= self._outputs.pop(position).nbytes
        wanted = 0 if output is None else output.shape[1]
        for index in range(wanted):
            assert output is not None
            told = output[:, index].clone()  # not the frame that it came in, which others' outputs share
            self._outputs[keep + tokens - wanted + index] = told
            self._n_bytes += told.nbytes
        while self._n_bytes > self._limits.output_bytes:
            self._n_bytes -= self._outputs.pop(next(iter(self._outputs))).nbytes


@dataclass(frozen=True, slots=True)
class Testimony:
    """The answers of a session's hops, and the positions that they were given.

    past: all positions, in order, as the client's journal has them; expansion makes activations of it, if it keeps
    token ids. outputs: as in `Transcript`. route: the hops, which were the same all the time.
    """

    past: tuple[Past, ...]
    outputs: Mapping[int, Tensor]
    route: tuple[Hop, ...]
    expansion: Expansion | None = None

    @property
    def rows(self) -> int:
        """Rows of the session."""
        return self.past[0].rows

    @property
    def length(self) -> int:
        """Positions of the session."""
        return self.past[-1].stop


def _places(hops: tuple[Hop, ...]) -> list[tuple[str, object]]:
    return [(hop.process, hop.blocks) for hop in hops]
