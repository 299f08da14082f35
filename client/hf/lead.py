"""The steps that lead the caller of one session: the token that it asks for, and guesses behind it.

A quick draft guesses whenever the caller asks. A slow one, such as a model, guesses in a thread of its own, while steps
travel. So a guess costs time only if the route is quicker than the draft. Both send their guesses under one lock,
because steps are in order.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Protocol

import structlog
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from swarm.activations import Activations
from swarm.client.hf.outputs import Context
from swarm.client.speculation.calibration import Calibration, Calibrations
from swarm.client.speculation.drafts import Draft, Guess
from swarm.client.speculation.limits import AheadLimits
from swarm.client.speculation.pace import Pace, cut_off
from swarm.client.speculation.pipe import Counts, Frame, Pipe

_log = structlog.get_logger("swarm.ahead")


class Pending(Protocol):
    """A step. Its answer is on the way."""

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

    @property
    def load(self) -> float:
        """Steps of others that the busiest hop announced when the route was planned."""
        ...

    @property
    def step_s(self) -> float:
        """Seconds that the slowest hop takes for a step, by what it announced; 0 where it is unknown."""
        ...

    def close(self) -> None:
        """Free the leases. Closing twice is fine."""
        ...


@dataclass(frozen=True, slots=True)
class Drafting:
    """Where guesses come from. make: a new draft, for one text. always: also where they seem to lose time.

    slow: makes a draft that takes its time, such as a model. It guesses in a thread, where the other one is silent.
    reads_outputs: whether it guesses from final hidden states; then those of the prompt come back, too. calibrations:
    how right they were in former texts.
    """

    make: Callable[[], Draft]
    always: bool = False
    slow: Callable[[Context], Draft] | None = None
    reads_outputs: bool = False
    calibrations: Calibrations = field(default_factory=Calibrations, compare=False)


Embed = Callable[[Tensor, int], Tensor]
"""From token ids [1, n], and the position of the first one, to what block 0 gets, [1, n, hidden_size]."""


class Lead:
    """One session's steps in flight, and their sources. `step` is the caller's; `_draft_on` the thread's."""

    def __init__(
        self, session: RemoteSession, embed: Embed, most: int, positions_max: int, limits: AheadLimits
    ) -> None:
        """most: tokens that may be in flight."""
        self.pace = Pace()
        self.context = Context()
        self._sender = _Sender(session, embed)
        self._limits = replace(limits, tokens_max=min(most, limits.tokens_max))
        self._pipe: Pipe[Pending] = Pipe(limits, Calibration(), positions_max)
        self._drafting: Drafting | None = None
        self._draft: Draft | None = None
        self._slow: _Slow | None = None
        self._drafted: list[Guess] = []  # by the slow draft, behind all that is in flight
        self._turn = 0  # another one: the slow draft's guess under way is behind a text that did not come
        self._rests = True  # until the next step, nothing is guessed
        self._lock = threading.Lock()

    @property
    def counts(self) -> Counts:
        """The fate of guesses, counted."""
        return self._pipe.counts

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return len(self._pipe.text)

    @property
    def is_ahead(self) -> bool:
        """Whether guesses are in flight."""
        return bool(self._pipe.guesses)

    def draws_from(self, drafting: Drafting) -> None:
        """Take guesses from these drafts from now on."""
        if self._drafting is not drafting:
            with self._lock:
                self._drafting = drafting
                self._begin()

    def rest(self) -> None:
        """Guess nothing until the next `step`: the session is about to be used without it."""
        with self._lock:
            self._turns(is_over=True)

    def restart(self, keep: int, ids: Sequence[int] | None) -> None:
        """Take a step that did not come through here: the servers keep so many tokens, and have these behind them.

        ids: None where the tokens are unknown.
        """
        with self._lock:
            pipe = self._pipe
            is_other = keep < len(pipe.text)
            pipe.restart(min(keep, len(pipe.text)))
            if ids is not None and keep == len(pipe.text):
                pipe.restart(keep, ids)
            if is_other:
                self._begin()  # the drafts' text was another one

    def step(self, token: int, activations: Activations, processors: LogitsProcessorList | None = None) -> Tensor:
        """Run the caller's next token, or take its output from the steps in flight. Returns [1, 1, hidden_size].

        processors: of a caller that samples.
        """
        pipe, position = self._pipe, len(self._pipe.text)
        if self._slow is not None and processors is not None:
            self.context.draws.at(position + 1, processors)
        else:
            self.context.draws.none()
        with self._lock:
            asked = time.perf_counter()
            is_right = self._feed(token)
            if not is_right:
                guesses = self._sent() or self._guesses()
                if not guesses and not self._drafts_slowly and self._sender.is_idle:
                    pipe.plain()
                    return self._plain(activations, position)
                self._sender.send(pipe.frame(guesses), activations.hidden)
            frame = pipe.covering(position)
            while guesses := self._guesses():
                self._sender.send(pipe.frame(guesses), None)
            is_guessed = self._drafts_slowly or self.is_ahead or len(frame.tokens) > 1
        slow = self._slow  # its own thread gives it up when it fails
        if slow is not None:
            slow.thread.wake()
        assert frame.answer is not None
        self.pace.asked(asked, is_there=frame.answer.is_done)
        output = frame.answer.wait()
        self.pace.returned(time.perf_counter(), is_guessed=is_guessed, is_trip=not is_right)
        return output[:, position - frame.start :][:, :1].to(activations.hidden.device)

    def close(self) -> None:
        """End the slow draft. Does not wait, and may be called anywhere."""
        slow, self._slow = self._slow, None
        if slow is not None:
            slow.thread.close()

    def _plain(self, activations: Activations, position: int) -> Tensor:
        self.pace.asked(time.perf_counter())
        output = self._sender.session.step(activations, keep=position, rows=None, want=1)
        self.pace.returned(time.perf_counter(), is_guessed=False, is_trip=True)
        return output

    # In the slow draft's thread

    def _draft_on(self) -> bool:
        """Have the slow draft make one guess. Returns whether it is to make another."""
        with self._lock:
            slow, turn, pipe = self._slow, self._turn, self._pipe
            while slow is not None and not self._drafted and (guesses := self._guesses()):
                self._sender.send(pipe.frame(guesses), None)
            if slow is None or not self._drafts_slowly or self._adapted().slow_room <= len(self._drafted):
                self._send_drafted()
                return False
            text, known = list(pipe.text), [*pipe.guesses, *(guess.token for guess in self._drafted)]
        began = time.perf_counter()
        try:
            found = slow.draft.propose(text, known, 1)
        except Exception as error:  # noqa: BLE001 - such as a device without memory; a draft may be anybody's
            _log.warning("the draft fails; going on without it", error=str(error)[:200])
            self.close()
            return False
        with self._lock:
            if known:  # else the time is that of reading the new part of the text
                self.pace.drafted(time.perf_counter() - began)
            if turn != self._turn or slow is not self._slow:
                return slow is self._slow
            is_likely = len(self._pipe.likely([*self._drafted, *found])) > len(self._drafted)
            if is_likely:
                self._drafted += found
            if not is_likely or len(self._drafted) >= self._adapted().fill:
                self._send_drafted()
            return is_likely

    # With the lock held

    def _begin(self) -> None:
        """Make new drafts, for another text."""
        self.close()
        self._turns(is_over=True)
        drafting = self._drafting
        if drafting is not None:
            self._draft = drafting.make()
            self._pipe.calibration = drafting.calibrations.next()
            if drafting.slow is not None:
                self._slow = _Slow(drafting.slow(self.context), Background(self._draft_on))

    def _turns(self, *, is_over: bool = False) -> None:
        """The slow draft's guesses are behind a text that did not come. is_over: it is to wait."""
        self._turn += 1
        self._drafted.clear()
        self._rests = is_over

    def _feed(self, token: int) -> bool:
        """Take the caller's next token. Returns whether it is in flight as a guess."""
        was_ahead, self._rests = self.is_ahead, False
        is_right = self._pipe.feed(token)
        if not is_right:
            if not was_ahead and self._drafted and self._drafted[0].token == token:
                del self._drafted[0]  # it was guessed, and not sent yet
            else:
                self._turns()
        return is_right

    @property
    def _drafts_slowly(self) -> bool:
        return self._slow is not None and not self._rests and self._may_go_on

    @property
    def _may_go_on(self) -> bool:
        assert self._drafting is not None
        return self._drafting.always or not self.pace.loses

    def _adapted(self) -> Pipe[Pending]:
        """Return the pipe, with bounds by the times of this session and the load of its hops."""
        pipe, session = self._pipe, self._sender.session
        pipe.depth = min(self._limits.tokens_max, self.pace.depth)
        pipe.cut_off = cut_off(session.load, self._limits)
        pipe.gathered = self.pace.gathered(session.step_s)
        return pipe

    def _guesses(self) -> list[tuple[Guess, float]]:
        """Return the quick draft's guesses, as far as they are worth it."""
        draft = self._draft
        if draft is None or not self._adapted().room or self._rests or self._drafted or not self._may_go_on:
            return []
        guesses = self._pipe.guessed(draft)
        if guesses and self._slow is not None:
            if guesses[0][1] < self._limits.lookup_min:
                return []  # the slow draft knows better
            self._turn += 1
        return guesses

    def _sent(self) -> list[tuple[Guess, float]]:
        """Return the slow draft's guesses, as far as they are worth it; they are to be sent."""
        drafted = self._pipe.likely(self._drafted[: self._adapted().slow_room])
        if len(drafted) < len(self._drafted):
            self._turn += 1
        self._drafted.clear()
        return drafted

    def _send_drafted(self) -> None:
        if self._adapted().slow_room and (guesses := self._sent()):
            self._sender.send(self._pipe.frame(guesses), None)


@dataclass(frozen=True, slots=True)
class _Slow:
    """A slow draft and its thread."""

    draft: Draft
    thread: "Background"


class _Sender:
    """Frames of tokens become steps of the session."""

    def __init__(self, session: RemoteSession, embed: Embed) -> None:
        self.session = session
        self._embed = embed
        self._last: Pending | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return self._last is None or self._last.is_done

    def send(self, frame: Frame[Pending], hidden: Tensor | None) -> None:
        """Send a frame. hidden: of its first token, where the caller has embedded that."""
        known = 0 if hidden is None else 1
        parts = [] if hidden is None else [hidden]
        try:
            if len(frame.tokens) > known:
                parts.append(self._embed(torch.tensor([frame.tokens[known:]]), frame.start + known))
            frame.answer = self.session.put(Activations(torch.cat(parts, dim=1)), keep=frame.start)
        except Exception as error:  # noqa: BLE001 - raised where the answer is waited for
            frame.answer = _Failed(error)  # it is the caller's that waits for this frame
        self._last = frame.answer


@dataclass(frozen=True, slots=True)
class _Failed:
    """The answer of a step that could not be sent."""

    error: Exception
    is_done: bool = True

    def wait(self) -> Tensor:
        raise self.error


class Background:
    """A thread that works when it is woken, until its work is done."""

    def __init__(self, work: Callable[[], bool]) -> None:
        """work: does a part of it, and returns whether there is more."""
        self._work = work
        self._bell: SimpleQueue[bool] = SimpleQueue()
        self._is_open = True
        threading.Thread(target=self._run, name="swarm-draft", daemon=True).start()

    def wake(self) -> None:
        """There is work."""
        self._bell.put(True)

    def close(self) -> None:
        """End the thread after the part that it is at. Does not wait."""
        self._is_open = False
        self._bell.put(False)

    def _run(self) -> None:
        while self._bell.get() and self._is_open:
            while self._is_open and self._work():
                pass
