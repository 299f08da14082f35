"""Whole swarms on a virtual clock, with tokens guessed ahead: hops die with wrong guesses in flight."""

import asyncio
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.session.flight import Flight
from swarm.client.session.session import Session
from swarm.client.session.steps import Steps
from swarm.client.speculation.pipe import Pipe
from swarm.protocol.messages import Step
from swarm.server.session import Answer, HostedSession
from tests.simulation.__main__ import replay
from tests.simulation.going import Going, played
from tests.simulation.guesser import Guesser
from tests.simulation.model import HashCache, HashSpan, embed
from tests.simulation.run import Outcome, simulate
from tests.simulation.world import N_BLOCKS
from tests.support.often import rest_is_long

SEEDS, PART, OFTEN = 200, 2, (0,)  # seeds of the sweep, of one test, and the tests of `make test`
SLOW, FAST = 6.0, 60.0  # departures a minute, among a hundred servers


def guessed(seed: int) -> Outcome:
    return simulate(seed, SLOW if seed % 2 else FAST, user=Guesser)


@pytest.mark.slow("four whole swarms")
@pytest.mark.parametrize("first", rest_is_long(range(0, SEEDS, PART), OFTEN))
def test_no_token_differs_and_nothing_hangs_though_guesses_are_in_flight(first: int) -> None:
    outcomes = [guessed(seed) for seed in range(first, first + PART)]
    bad = [outcome for outcome in outcomes if not outcome.good]
    assert not bad, "\n".join(f"{o.error or o.faults or o.wrong}: {replay(o)}" for o in bad)


def test_hops_die_under_guesses() -> None:
    """Or the sweep would try nothing."""
    assert guessed(0).repairs


@pytest.mark.long
def test_hops_skip_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the sweep would not try that either."""
    skipped, skip = [], HostedSession.skip

    def counted(self: HostedSession, step: Step) -> Answer:
        skipped.append(step.hidden is None)
        return skip(self, step)

    monkeypatch.setattr(HostedSession, "skip", counted)
    assert all(guessed(seed).good for seed in range(2))
    assert skipped.count(False) > 10  # at the first hop that did
    assert skipped.count(True) > 10  # at those behind it


def test_a_session_with_steps_always_in_flight_leaves_a_hop_that_leaves() -> None:
    async def scenario(going: Going) -> None:
        await going.say(4)
        local, past, coming = HashSpan(Blocks(0, N_BLOCKS)), HashCache(N_BLOCKS), deque[tuple[Any, Tensor]]()
        local.forward(embed([[0, 1, 2, 3]]), cache=past)

        def put() -> None:
            hidden = embed([[past.length]])
            answer = going.session.put(Activations(hidden), keep=past.length)
            coming.append((answer, local.forward(hidden, cache=past)))

        async def take() -> None:
            answer, expected = coming.popleft()
            assert torch.equal(await answer, expected)

        for _ in range(6):
            put()
        leaver = going.session.route[1].process
        going.hosts[1].leave()
        for _ in range(40):
            await take()
            put()
        assert leaver not in {hop.process for hop in going.session.route}
        while coming:
            await take()
        assert going.failures() == []

    played(scenario)


def steps_in_flight_are_forgotten_though_they_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget_guesses(self: Steps, keep: int) -> None:
        for ticket in self._outbox._tickets.values():
            ticket.has_left = False
        self._outbox.truncate(self._outbox.last_of(keep))
        self._journal.truncate(self._outbox.last_put)

    monkeypatch.setattr(Steps, "forget_guesses", forget_guesses)


def one_position_too_many_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Session.put

    def put(self: Session, activations: Activations, *, keep: int) -> "asyncio.Future[Tensor]":
        return whole(self, activations, keep=keep + 1 if keep < self.length else keep)

    monkeypatch.setattr(Session, "put", put)


def answers_of_a_wrong_path_count(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Pipe.feed

    def feed(self: Pipe, token: int) -> bool:
        guesses, frames = list(self._guesses), list(self._frames)
        is_right = whole(self, token)
        if guesses and not is_right:
            self._guesses.extend(guesses[1:])
            self._frames.extend(frames)
        return bool(guesses)

    monkeypatch.setattr(Pipe, "feed", feed)


def the_step_that_takes_guesses_back_counts_as_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is dropped like those that may have been skipped."""

    def send(self: Flight, step: Any) -> None:
        step.ticket = self._travel.steps.put(step.chunk, step.deadline, skips=step.restart)
        if step.restart:
            self._travel.steps.forget_guesses(step.chunk.keep)

    monkeypatch.setattr(Flight, "_send", send)


def a_skipped_step_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client drops its answer as if it were none."""
    answer = Steps.answer

    def counted(self: Steps, step: int, output: Activations | None) -> None:
        if output is not None:
            answer(self, step, output)

    monkeypatch.setattr(Steps, "answer", counted)


@pytest.mark.parametrize(
    "mutation",
    rest_is_long(
        [
            steps_in_flight_are_forgotten_though_they_left,
            one_position_too_many_stays,
            answers_of_a_wrong_path_count,
            the_step_that_takes_guesses_back_counts_as_one_of_them,
            a_skipped_step_is_not_counted,
        ],
        [one_position_too_many_stays],
    ),
    ids=lambda mutation: mutation.__name__,
)
def test_guesses_that_are_handled_wrongly_are_noticed(mutation, monkeypatch) -> None:
    def is_noticed(seed: int) -> bool:
        try:
            return not guessed(seed).good
        except RuntimeError:  # broken, the pipe finds no frame in flight
            return True

    mutation(monkeypatch)
    assert any(map(is_noticed, range(SEEDS)))
