"""Computes a session's positions anew, in steps that look like the session's own.

    prompt    the positions before the session's first answer, behind OPEN; as many outputs are wanted as that had
    singles   some positions behind the prompt, one by one
    rest      all others, in chunks of which all outputs are wanted

Servers see a session's steps until the rest comes. So one that is wrong only in steps of one position is wrong in
replays, too. The number of single steps is drawn for each audit: a server could be wrong only behind a known one. All
replays of an audit have the same number, so that such a server is wrong in the same way in each. A server that breaks
its replays off gets none: else nothing could be compared with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from swarm.activations import Activations
from swarm.client.auditing.collect import first_positions
from swarm.client.auditing.inquest import Outputs
from swarm.client.session.session import First, Session
from swarm.client.session.transcript import Testimony
from swarm.protocol.journal import Past, rebuild_messages


@dataclass(frozen=True, slots=True)
class Shape:
    """The steps of a replay. prompt: positions of the first step. want: its outputs. stop: of the single steps."""

    prompt: int
    want: int
    stop: int

    def without_singles(self) -> "Shape":
        """Return the steps of which the rest comes right behind the prompt."""
        return replace(self, stop=self.prompt)


def shape_of(testimony: Testimony, singles: int) -> Shape:
    """Return the steps for a session's positions. singles: the most that come one by one."""
    first = min(testimony.outputs)
    prompt = min(first + testimony.want, testimony.length)
    return Shape(prompt, min(testimony.want, prompt), min(prompt + singles, testimony.length))


def opening(testimony: Testimony, shape: Shape) -> tuple[First, Activations]:
    """Return the first step, and the positions of the single ones."""
    given = first_positions(testimony, shape.stop)
    return First(given.part(0, shape.prompt), shape.want), given.part(shape.prompt, shape.stop)


async def computed(testimony: Testimony, shape: Shape, first: First, singles: Activations, session: Session) -> Outputs:
    """Have a session compute all positions. Returns the outputs of those that were told. Raises SwarmError.

    session: opened for `first`.
    """
    outputs: dict[int, Tensor] = {}

    async def step(stop: int, activations: Activations, want: int) -> None:
        hidden = await session.step(activations, want=want)
        told = range(stop - want, stop)
        outputs.update({at: hidden[:, at - told.start] for at in told if at in testimony.outputs})

    await step(shape.prompt, first.activations, first.want)
    for at in range(singles.tokens):
        await step(shape.prompt + at + 1, singles.part(at, at + 1), 1)
    rest = _behind(testimony.past, shape.stop)
    for message, activations in rebuild_messages("0" * 32, 0, rest, 1, expansion=testimony.expansion):
        await step(message.start + activations.tokens, activations, activations.tokens)
    return outputs


def _behind(pieces: Sequence[Past], start: int) -> tuple[Past, ...]:
    """Return the part of a past from a position on."""
    return tuple(piece.part(start, piece.stop) for piece in pieces if piece.stop > start)
