"""A session that goes ahead of its caller: guesses of the next tokens travel before the caller asks for them.

`generate()` and hand-written loops feed one token after the other, as ever. If the token is the one that was guessed,
its output is on the way, or here already; if not, the route takes back what was guessed wrong. So all that decides
about tokens (processors, sampling, its random numbers, streamers, stopping) stays the caller's, and is the same with
and without guesses.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swarm.activations import Activations
from swarm.client.speculation.calibration import Calibration
from swarm.client.speculation.drafts import Draft, Guess
from swarm.client.speculation.limits import AheadLimits
from swarm.client.speculation.pipe import Counts, Frame, Pipe


class Pending(Protocol):
    """A step whose answer is on the way."""

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns at once."""
        ...

    def wait(self) -> Tensor:
        """Return the output, or raise the error that the session has ended with."""
        ...


class RemoteSession(Protocol):
    """A session along a route, for a thread that waits."""

    def step(self, activations: Activations, *, keep: int, rows: Sequence[int] | None, want: int) -> Tensor:
        """As `swarm.client.session.session.Session.step`."""
        ...

    def put(self, activations: Activations, *, keep: int) -> Pending:
        """As `swarm.client.session.session.Session.put`; all outputs are wanted. Only after the first step."""
        ...

    def close(self) -> None:
        """Free the leases. Closing twice is fine."""
        ...


@dataclass(frozen=True, slots=True)
class Drafting:
    """Where guesses come from. make: a new draft, for one text. always: also where the route is quick."""

    make: Callable[[], Draft]
    always: bool = False


Embed = Callable[[Tensor, int], Tensor]
"""From token ids [1, n], and the position of the first one, to what block 0 gets, [1, n, hidden_size]."""


class AheadSession:
    """Steps of one session, with guesses ahead of them where they help."""

    def __init__(
        self, session: RemoteSession, embed: Embed, most: int, positions_max: int, limits: AheadLimits | None = None
    ) -> None:
        """most: tokens that may be taken back at a time, or 0."""
        self._session = session
        self._embed = embed
        self._positions_max = positions_max
        self._limits = limits or AheadLimits()
        self._most = min(most, self._limits.tokens_max)
        self._pipe: Pipe[Pending] = Pipe(self._limits, Calibration())
        self._drafting: Drafting | None = None
        self._draft: Draft | None = None
        self._unread: list[tuple[int, list[int] | None]] = []  # steps that are not in the pipe's text: keep, and ids
        self._embeds: bool | None = None  # whether tokens can be embedded ahead; None where it was not tried
        self._last: Pending | None = None
        self._pace = _Pace()

    @property
    def counts(self) -> Counts:
        """What became of guesses."""
        return self._pipe.counts

    def step(
        self,
        activations: Activations,
        *,
        keep: int,
        rows: Sequence[int] | None,
        want: int,
        ids: Tensor | None = None,
        drafting: Drafting | None = None,
    ) -> Tensor:
        """As `RemoteSession.step`. ids: the tokens of these activations, int64 [rows, tokens], where they are known.

        drafting: None for no guesses.
        """
        is_plain = rows is None and activations.positions is None and activations.mask is None
        text = ids if is_plain and activations.hidden.shape[0] == 1 else None
        if drafting is None:
            output = self._session.step(activations, keep=keep, rows=rows, want=want)
        elif text is not None and text.shape[1] == 1 and self._may_guess(drafting) and self._reads(keep):
            return self._ahead(activations, text)
        else:
            asked = time.perf_counter()
            output = self._session.step(activations, keep=keep, rows=rows, want=want)
            if activations.hidden.shape[1] == 1:
                self._pace.trip(asked)
        self._unread.append((keep, None if text is None else text.tolist()[0]))
        return output

    def close(self) -> None:
        """Free the leases."""
        self._session.close()

    def _may_guess(self, drafting: Drafting) -> bool:
        if not self._most or self._embeds is False:
            return False
        if self._drafting is not drafting:
            self._drafting, self._draft = drafting, drafting.make()
        return drafting.always or self._pace.trip_s >= self._limits.trip_s_min

    def _reads(self, keep: int) -> bool:
        """Bring the text to what the servers hold. Returns whether all of its tokens are known."""
        pipe = self._pipe
        for kept, ids in [*self._unread, (keep, None)] if self._unread or keep != len(pipe.text) else ():
            if kept < len(pipe.text) and self._drafting is not None:
                self._draft = self._drafting.make()  # its text was another one
            pipe.restart(min(kept, len(pipe.text)))
            if ids is not None and kept == len(pipe.text):
                pipe.restart(kept, ids)
        self._unread.clear()
        return len(pipe.text) == keep > 0

    def _ahead(self, activations: Activations, ids: Tensor) -> Tensor:
        pipe, position, asked = self._pipe, len(self._pipe.text), time.perf_counter()
        if self._embeds is None:
            self._embeds = torch.equal(self._embed(ids, position), activations.hidden)
        if not pipe.feed(int(ids[0, 0])):
            guesses = self._guesses() if self._embeds else []
            if not guesses and (self._last is None or self._last.is_done):
                pipe.counts.computed += 1
                output = self._session.step(activations, keep=position, rows=None, want=1)
                self._pace.trip(asked)
                return output
            self._send(pipe.frame(guesses), activations.hidden)
        frame = pipe.covering(position)
        assert frame.answer is not None
        while self._embeds and (guesses := self._guesses()):
            self._send(pipe.frame(guesses), None)
        self._pace.asked(asked, is_there=frame.answer.is_done)
        output = frame.answer.wait()
        if frame.start == position:
            self._pace.trip(asked)
        self._pace.returned()
        return output[:, position - frame.start :][:, :1].to(activations.hidden.device)

    def _guesses(self) -> list[tuple[Guess, float]]:
        pipe, draft = self._pipe, self._draft
        assert draft is not None
        pipe.depth = min(self._most, self._pace.depth)
        known = pipe.guesses
        room = min(pipe.room, self._positions_max - len(pipe.text) - len(known))
        return pipe.likely(draft.propose(pipe.text, known, room)) if room > 0 else []

    def _send(self, frame: Frame[Pending], hidden: Tensor | None) -> None:
        """Send a frame. hidden: of its first token, where the caller has embedded that."""
        known = 0 if hidden is None else 1
        parts = [] if hidden is None else [hidden]
        if len(frame.tokens) > known:
            parts.append(self._embed(torch.tensor([frame.tokens[known:]]), frame.start + known))
        frame.answer = self._last = self._session.put(Activations(torch.cat(parts, dim=1)), keep=frame.start)


class _Pace:
    """How long a trip around the route takes, and the caller's part of a token. Means that follow, in seconds."""

    def __init__(self) -> None:
        self.trip_s = 0.0
        self._token_s = 0.002
        self._returned = 0.0

    @property
    def depth(self) -> int:
        """Tokens that fill a trip."""
        return 1 + int(self.trip_s / self._token_s)

    def trip(self, asked: float) -> None:
        """An output that nothing was known of has come. asked: when it was asked for."""
        took = time.perf_counter() - asked
        self.trip_s = took if not self.trip_s else self.trip_s + 0.2 * (took - self.trip_s)

    def asked(self, now: float, *, is_there: bool) -> None:
        """The caller has asked for an output. is_there: it need not wait."""
        if is_there and self._returned:
            self._token_s += 0.1 * (now - self._returned - self._token_s)

    def returned(self) -> None:
        """The caller has its output."""
        self._returned = time.perf_counter()
