"""Guesses of next tokens travel ahead of one generation, in steps that leave before the answers before them.

    Engine -> Guessing             whether its streams may guess at all, and what became of their guesses
    _Run   -> Ahead.step           its next tokens; their output is on the way already if they were guessed
                -> Pipe            which tokens are in flight (pure; swarm.client.speculation)
                -> Session.put     the text's end, and guesses behind it

The sampler sees the outputs of the text alone, one after the other. So tokens, probabilities, grammars, penalties and
random numbers are those of a generation without guesses, and no guess is counted as a token of the answer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from swarm.activations import Activations
from swarm.client.planning.route import load_of
from swarm.client.session.session import Session
from swarm.client.speculation.calibration import Calibration
from swarm.client.speculation.drafts import Draft, Guess
from swarm.client.speculation.limits import AheadLimits, PaceLimits
from swarm.client.speculation.pace import Pace, pays
from swarm.client.speculation.pipe import Frame, Pipe
from swarm.limits import limit

DraftUse = Literal["lookup", "none"]
"""Where guesses come from: the text's own repetitions, or nowhere."""

Embed = Callable[[Sequence[int], int], Awaitable[Tensor]]
"""From token ids, and the position of the first one, to what block 0 gets, [1, tokens, hidden_size]."""

Answer = asyncio.Future[Tensor]


@dataclass(frozen=True, slots=True)
class GuessLimits:
    """When the generations of one model guess, and how far."""

    streams_max: int = limit(4, "streams", "that guess, of one model; more fill trips and batches by themselves")
    read_tokens: int = limit(2048, "tokens", "that look-up reads of a text between two tokens; other streams wait")
    ahead: AheadLimits = field(default_factory=AheadLimits)
    pace: PaceLimits = field(default_factory=PaceLimits)


class Guessing:
    """What the streams of one engine share. Counts go up only."""

    def __init__(self, make: Callable[[], Draft] | None, limits: GuessLimits) -> None:
        """make: a draft for one text; None where nothing is guessed."""
        self.limits = limits
        self.make = make
        self.streams = 0  # that run
        self.sent = 0  # guessed tokens
        self.kept = 0  # those that became the text

    @property
    def is_crowded(self) -> bool:
        """Whether so many streams run that none guesses."""
        return self.streams > self.limits.streams_max

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream within the block."""
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1


class Ahead:
    """One generation's steps behind its prompt."""

    def __init__(
        self,
        session: Session,
        text: Sequence[int],
        guessing: Guessing,
        embed: Embed,
        *,
        positions_max: int,
        now: Callable[[], float],
    ) -> None:
        """text: the tokens that the session has. positions_max: of the text at its longest. now: in seconds."""
        self._session = session
        self._guessing = guessing
        self._embed = embed
        self._now = now
        self._pace = Pace(guessing.limits.pace)
        self._pipe: Pipe[Answer] = Pipe(guessing.limits.ahead, Calibration(), positions_max)
        self._pipe.cut_off = guessing.limits.ahead.cut_off_busy  # other streams use the same servers
        self._pipe.restart(0, text)
        self._draft: Draft | None = None
        self._read = 0  # tokens of the text that the draft knows
        self._last: Answer | None = None  # of all steps that were put ahead

    async def step(self, ids: Sequence[int], embedded: Tensor) -> Tensor:
        """Run the generation's next tokens, or wait for their output if they were guessed.

        embedded: [1, tokens, hidden_size]. Returns the output of the last token, [1, 1, hidden_size]. Raises as
        `Session.step` does.
        """
        pipe, guessing = self._pipe, self._guessing
        for token in ids:
            guessing.kept += pipe.feed(token)
        asked, unsent, position = self._now(), pipe.unsent, len(pipe.text) - 1
        guesses = self._guesses()
        if unsent:
            is_long = unsent > guessing.limits.ahead.frame_tokens
            if is_long or (not guesses and self._is_idle):
                return await self._plain(ids[-unsent:], embedded[:, -unsent:])
        if guesses or unsent:
            await self._send(guesses, embedded[:, embedded.shape[1] - unsent :])
        while guesses := self._guesses():
            await self._send(guesses, embedded[:, :0])
        frame = pipe.covering(position)
        is_guessed = bool(pipe.guesses) or not unsent
        assert frame.answer is not None
        self._pace.asked(asked, is_there=frame.answer.done())
        output = await frame.answer
        self._pace.returned(self._now(), is_guessed=is_guessed, is_trip=unsent > 0)
        at = position - frame.start
        return output[:, at : at + 1]

    @property
    def _is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return self._last is None or self._last.done()

    def _guesses(self) -> list[tuple[Guess, float]]:
        """Return what is worth sending now, and how likely it is."""
        guessing, pipe = self._guessing, self._pipe
        if guessing.make is None or guessing.is_crowded:
            self._draft, self._read = None, 0  # its index is several times as large as the text
            return []
        if not pays(self._pace, load_of(self._session.route), guessing.limits.ahead):
            return []
        if self._draft is None:
            self._draft = guessing.make()
        if self._read < len(pipe.text):
            self._read = min(len(pipe.text), self._read + guessing.limits.read_tokens)
            if self._read < len(pipe.text):
                self._draft.propose(pipe.text[: self._read], (), 0)
                return []
        pipe.depth = min(guessing.limits.ahead.tokens_max, self._pace.depth)
        return pipe.guessed(self._draft)

    async def _plain(self, ids: Sequence[int], embedded: Tensor) -> Tensor:
        """Run the last tokens of the text, and wait for their output; nothing is guessed behind them."""
        keep = len(self._pipe.text) - len(ids)
        self._pipe.plain()
        self._pace.asked(self._now())
        tensor = torch.tensor([list(ids)], dtype=torch.int32)
        output = await self._session.step(Activations(embedded), keep=keep, want=1, ids=tensor)
        self._pace.returned(self._now(), is_guessed=False, is_trip=True)
        return output

    async def _send(self, guesses: Sequence[tuple[Guess, float]], embedded: Tensor) -> None:
        """Put a step ahead. embedded: of the text's tokens in it, [1, tokens, hidden_size]."""
        frame: Frame[Answer] = self._pipe.frame(guesses)
        known = embedded.shape[1]
        if guesses:
            behind = await self._embed(frame.tokens[known:], frame.start + known)
            embedded = torch.cat([embedded, behind], dim=1)
        ids = torch.tensor([frame.tokens], dtype=torch.int32)
        self._last = frame.answer = self._session.put(Activations(embedded), keep=frame.start, ids=ids)
        self._guessing.sent += len(guesses)
