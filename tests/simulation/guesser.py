"""A user whose tokens are guessed ahead: as right as a random draft, with several steps and wrong guesses in flight."""

import asyncio
from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from swarm.activations import Activations
from swarm.client.session.session import Session
from swarm.client.speculation.calibration import Calibration
from swarm.client.speculation.drafts import Guess
from swarm.client.speculation.limits import AheadLimits
from swarm.client.speculation.pipe import Frame, Pipe
from swarm.protocol.inbox import InboxLimits
from tests.simulation.model import embed, greedy
from tests.simulation.run import HOSTED, User, in_time

AHEAD = AheadLimits(tokens_max=32, frame_tokens=4, frame_tokens_min=1, frames_max=InboxLimits().window_steps)


class Guesser(User):
    """Generates one row. The draft knows the truth, and tells it so often as its seed says."""

    batches = (1,)
    rollback_max = 2 * AHEAD.tokens_max
    hosted = replace(HOSTED, inbox=InboxLimits())

    async def _generate(self, session: Session, prompt: list[list[int]], mask: Tensor | None) -> None:
        assert mask is None
        self._right = self._rng.choice((0.3, 0.7, 0.95))
        (token,) = await self._step(session, prompt)
        pipe: Pipe[asyncio.Future[Tensor]] = Pipe(AHEAD, Calibration())
        pipe.restart(0, prompt[0])
        self._coming: list[tuple[int, Tensor]] = []  # tokens behind the text's next one, and the outputs before them
        for _ in range(self._tokens):
            if self._rng.random() < 0.03 and len(pipe.text) > AHEAD.tokens_max:
                keep = len(pipe.text) - self._rng.randrange(1, AHEAD.tokens_max)
                self._past.keep(keep)
                self._coming.clear()
                pipe.restart(keep)
                token = self._rng.randrange(4000)
            token = await self._fed(session, pipe, token)
            if self._rng.random() < 0.1:
                await asyncio.sleep(self._rng.random())

    async def _fed(self, session: Session, pipe: "Pipe[asyncio.Future[Tensor]]", token: int) -> int:
        """Feed a token. Returns the next one."""
        is_guessed = pipe.feed(token)
        truth = self._truth(token, AHEAD.tokens_max + 1)
        while True:
            guesses = [(Guess(each, 0), 1.0) for each in self._guesses(truth, len(pipe.guesses), pipe.room)]
            if is_guessed and not guesses:
                break
            self._send(session, pipe.frame(guesses))
            is_guessed = True
        position = len(pipe.text) - 1
        frame = pipe.covering(position)
        assert frame.answer is not None
        output = (await in_time(frame.answer))[:, position - frame.start :][:, :1]
        token, expected = self._coming.pop(0)
        self._outcome.tokens += 1
        self._outcome.wrong += not torch.equal(output, expected)
        return token

    def _send(self, session: Session, frame: "Frame[asyncio.Future[Tensor]]") -> None:
        frame.answer = session.put(Activations(embed([frame.tokens])), keep=frame.start)

    def _guesses(self, truth: list[int], known: int, room: int) -> list[int]:
        count = self._rng.randrange(room + 1) if room else 0
        rng: Random = self._rng
        return [token if rng.random() < self._right else rng.randrange(4000) for token in truth[known : known + count]]

    def _truth(self, token: int, count: int) -> list[int]:
        """Return the tokens that follow one that was fed; locally they are computed once."""
        while len(self._coming) < count:
            last = self._coming[-1][0] if self._coming else token
            output = self._local.forward(embed([[last]]), cache=self._past)
            self._coming.append((greedy(output)[0], output))
        return [each for each, _ in self._coming]
