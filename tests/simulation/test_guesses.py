"""Whole swarms on a virtual clock, with tokens guessed ahead: hops die with wrong guesses in flight."""

import asyncio

import pytest
from torch import Tensor

from swarm.activations import Activations
from swarm.client.session.session import Session
from swarm.client.session.steps import Steps
from swarm.client.speculation.pipe import Pipe
from tests.simulation.__main__ import replay
from tests.simulation.guesser import Guesser
from tests.simulation.run import Outcome, simulate
from tests.support.often import rest_is_long

SEEDS, PART, OFTEN = 200, 4, (0,)  # seeds of the sweep, of one test, and the tests of `make test`
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


def steps_in_flight_are_forgotten_though_they_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget_guesses(self: Steps) -> None:
        for ticket in self._outbox._tickets.values():
            ticket.has_left = False
        self._outbox.truncate(self._outbox.last_answered)
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


@pytest.mark.parametrize(
    "mutation",
    rest_is_long(
        [
            steps_in_flight_are_forgotten_though_they_left,
            one_position_too_many_stays,
            answers_of_a_wrong_path_count,
        ],
        [one_position_too_many_stays],
    ),
    ids=lambda mutation: mutation.__name__,
)
def test_guesses_that_are_handled_wrongly_are_noticed(mutation, monkeypatch) -> None:
    mutation(monkeypatch)
    assert any(not guessed(seed).good for seed in range(SEEDS))
