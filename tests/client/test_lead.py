"""The steps of one session ahead of its caller, over a route that answers when it is told to."""

import time
from types import SimpleNamespace

import pytest
import torch

from swarm.activations import Activations
from swarm.client.hf.lead import Drafting, Lead
from swarm.client.speculation.drafts import Guess
from swarm.client.speculation.limits import AheadLimits

TRIP_S = 0.03


class Answer:
    """Comes after a while."""

    def __init__(self, hidden, wait_s):
        self.is_done = not wait_s
        self._hidden, self._wait_s = hidden, wait_s

    def wait(self):
        time.sleep(self._wait_s)
        return self._hidden


class Route:
    """A session whose first step alone takes a trip: all later ones were guessed in time."""

    def __init__(self, load=0.0, step_s=0.0, trip_s=TRIP_S):
        self.load, self.step_s = load, step_s
        self.sizes = []
        self._trip_s = trip_s

    def put(self, activations, *, keep):
        self.sizes.append(activations.tokens)
        return Answer(activations.hidden, self._trip_s if len(self.sizes) == 1 else 0.0)


class Knowing:
    """A draft that knows the text, and takes its time."""

    def __init__(self, text, guess_s, likely):
        self._text, self._guess_s, self._likely = text, guess_s, likely

    def propose(self, text, guesses, count):
        time.sleep(self._guess_s)
        known = len(text) + len(guesses)
        return [Guess(token, 0, self._likely) for token in self._text[known : known + count]]


def lead_of(route, text, *, slow_s=None, likely=None):
    """Return a lead behind four tokens. slow_s: of each guess of a slow draft; else a quick one guesses."""
    lead = Lead(route, lambda ids, _: ids[..., None].float(), 64, 200, AheadLimits())
    silent = SimpleNamespace(propose=lambda *_: [])
    quick = (lambda: Knowing(text, 0.0, likely)) if slow_s is None else (lambda: silent)
    slow = None if slow_s is None else lambda _: Knowing(text, slow_s, likely)
    lead.draws_from(Drafting(quick, always=True, slow=slow))
    lead.restart(0, text[:4])
    return lead


def test_a_draft_that_was_right_in_one_text_goes_farther_in_the_next():
    text, sent = list(range(100)), []
    drafting = Drafting(lambda: Knowing(text, 0.0, 0.4), always=True)
    for tokens in (60, 1):
        route = Route()
        lead = Lead(route, lambda ids, _: ids[..., None].float(), 64, 200, AheadLimits())
        lead.draws_from(drafting)
        lead.restart(0, text[:4])
        lead.pace.trip_s = 10.0
        run(lead, text[4:5])
        sent.append(sum(route.sizes))
        run(lead, text[5 : 4 + tokens])
    assert sent[1] > sent[0] + 3


def run(lead, tokens):
    for token in tokens:
        lead.step(token, Activations(torch.full((1, 1, 1), float(token))))


def test_guesses_that_came_early_do_not_make_trips_shorter():
    text, route = list(range(40)), Route()
    lead = lead_of(route, text)
    run(lead, text[4:30])
    assert len(route.sizes) > 3
    assert lead.pace.trip_s >= TRIP_S


def first_trip(route, slow_s):
    """Return the sizes of the steps during a trip, of a draft that is slow by so much."""
    text = list(range(100))
    lead = lead_of(route, text, slow_s=slow_s, likely=0.99)
    lead.pace.trip_s = 10.0  # so many guesses fit into it
    run(lead, text[4:5])
    lead.close()
    return route.sizes


def test_the_first_guesses_of_a_trip_are_not_kept_waiting_for_others():
    """A hop that takes its time gets whole frames after that."""
    sizes = first_trip(Route(step_s=1.0, trip_s=1.0), 0.001)
    assert sizes[:7] == [1, 1, 1, 2, 4, 8, 8]


def test_a_draft_that_is_slower_than_hops_sends_each_guess_at_once():
    sizes = first_trip(Route(step_s=0.001, trip_s=0.6), 0.03)
    assert len(sizes) > 8
    assert set(sizes) == {1}


@pytest.mark.parametrize(("load", "guesses"), [(0.0, 5), (9.0, 3)])
def test_where_hops_are_busy_only_likelier_guesses_travel(load, guesses):
    """Each is right in half of all cases: the text gets behind six in 0.016 of them, and behind four in 0.06."""
    text, route = list(range(100)), Route(load=load)
    lead = lead_of(route, text, likely=0.2689)  # 0.5 with the shift that a draft begins with
    lead.pace.trip_s = 10.0
    run(lead, text[4:5])
    assert sum(route.sizes) - 1 == guesses
