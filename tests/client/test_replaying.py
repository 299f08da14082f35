"""The steps of a replay: those of a session, until the rest comes."""

from dataclasses import dataclass, field

import pytest
import torch

from swarm.activations import Activations
from swarm.client.auditing.replaying import Shape, computed, opening, shape_of
from swarm.client.session import transcript
from swarm.protocol.journal import Past

Told = tuple[int, int, int]  # positions that stayed before a step, its tokens, and its outputs


@dataclass
class Recorded:
    """A session whose outputs are its inputs. steps: as (position, tokens, want)."""

    length: int = 0
    steps: list[Told] = field(default_factory=list)

    async def step(self, activations: Activations, *, want: int) -> torch.Tensor:
        self.steps.append((self.length, activations.tokens, want))
        self.length += activations.tokens
        return activations.last(want).hidden


def session_of(*steps: Told, forgotten: int = 0) -> transcript.Testimony:
    """The testimony of a session of these steps, whose output at a position is the position. forgotten: outputs."""
    kept, length = transcript.Transcript(), 0
    for keep, tokens, want in steps:
        length = keep + tokens
        output = numbers(length - want, length) if want else None
        kept.note(keep, gathered=False, tokens=tokens, output=output)
    past = tuple(Past(at, Activations(numbers(at, min(at + 7, length)))) for at in range(0, length, 7))
    found = kept.testimony(past)
    assert found is not None
    outputs = dict(list(found.outputs.items())[forgotten:])
    return transcript.Testimony(found.past, outputs, found.route, want=found.want)


def numbers(start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop, dtype=torch.float32)[None, :, None]


async def replayed(testimony: transcript.Testimony, singles: int) -> list[Told]:
    shape, session = shape_of(testimony, singles), Recorded()
    first, alone = opening(testimony, shape)
    outputs = await computed(testimony, shape, first, alone, session)  # type: ignore[arg-type]
    assert {at: tensor.item() for at, tensor in outputs.items()} == {at: float(at) for at in testimony.outputs}
    return session.steps


GENERATED = ((0, 20, 1), *((at, 1, 1) for at in range(20, 50)))


async def test_a_replay_has_the_prompt_and_the_first_single_steps_of_its_session() -> None:
    steps = await replayed(session_of(*GENERATED), 8)
    assert steps[:9] == list(GENERATED[:9])
    assert steps[9:] == [(28, 22, 22)]


async def test_a_short_sessions_replay_is_the_session() -> None:
    assert await replayed(session_of(*GENERATED), 30) == list(GENERATED)
    assert await replayed(session_of(*GENERATED), 99) == list(GENERATED)


async def test_a_prompt_of_which_all_outputs_were_told_is_one_step() -> None:
    assert await replayed(session_of((0, 20, 20)), 8) == [(0, 20, 20)]


async def test_chunks_before_the_first_answer_are_of_the_prompt() -> None:
    steps = await replayed(session_of((0, 10, 0), (10, 10, 1), (20, 1, 1)), 8)
    assert steps == [(0, 20, 1), (20, 1, 1)]


@pytest.mark.parametrize("singles", [1, 3, 50])
@pytest.mark.parametrize(
    "session",
    [
        session_of(*GENERATED, forgotten=12),
        session_of(*GENERATED, (10, 1, 1), (11, 1, 1)),
        session_of((0, 9, 5), (9, 6, 1), (3, 1, 1), (4, 1, 1)),
        session_of((0, 9, 1), (9, 6, 0), (15, 5, 5), (18, 9, 2)),
        session_of((0, 1, 1)),
    ],
    ids=["forgotten", "taken back into the prompt", "behind its outputs", "a prompt in between", "one position"],
)
async def test_all_outputs_that_were_told_are_computed(session: transcript.Testimony, singles: int) -> None:
    steps = await replayed(session, singles)
    assert steps[0][0] == 0
    assert sum(tokens for _, tokens, _ in steps) == session.length
    assert all(want > 0 for _, _, want in steps)


def test_no_more_than_the_session_has_comes_one_by_one() -> None:
    assert shape_of(session_of(*GENERATED), 4) == Shape(20, 1, 24)
    assert shape_of(session_of(*GENERATED), 400) == Shape(20, 1, 50)
