"""Guesses of the next tokens without a swarm: look-up, what is learned of it, and what is in flight."""

from math import exp
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.speculation.calibration import Calibration, Calibrations
from swarm.client.speculation.drafts import Guess, Lookup
from swarm.client.speculation.limits import AheadLimits, CalibrationLimits
from swarm.client.speculation.pipe import Pipe

LIMITS = AheadLimits(tokens_max=12, frame_tokens=4, frame_tokens_min=2, frames_max=5)


def tokens(guesses):
    return [guess.token for guess in guesses]


# Look-up


def test_what_stood_behind_the_last_tokens_before_is_guessed():
    assert tokens(Lookup().propose([1, 2, 3, 4, 5, 9, 1, 2, 3], [], 2)) == [4, 5]


def test_text_that_repeats_itself_is_guessed_beyond_its_end():
    assert tokens(Lookup().propose([7, 1, 2, 3, 1, 2, 3], [], 7)) == [1, 2, 3, 1, 2, 3, 1]


def test_a_guess_is_continued():
    draft, text = Lookup(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert tokens(draft.propose(text, [4, 5], 2)) == [6, 7]


def test_new_text_is_not_guessed():
    draft = Lookup()
    assert draft.propose([1, 2, 3, 4, 5, 6], [], 4) == []
    assert draft.propose([1, 2, 3, 4, 5, 6, 2, 3], [], 4) == []  # a match of two is chance
    assert draft.propose([], [], 4) == []


def test_the_longest_match_counts_and_then_the_latest():
    text = [9, 1, 2, 3, 50, 8, 1, 2, 3, 60, 7, 1, 2, 3, 70, 0, 9, 1, 2, 3]
    assert tokens(Lookup().propose(text, [], 1)) == [50]
    assert tokens(Lookup().propose([*text[:-4], 5, 1, 2, 3], [], 1)) == [70]


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(0, 60), max_size=6), st.integers(1, 9))
def test_a_text_that_grew_is_guessed_like_one_that_came_at_once(text, steps, count):
    draft = Lookup()
    for stop in sorted(steps):
        found = draft.propose(text[:stop], [], count)
        assert len(found) <= count
        assert found == Lookup().propose(text[:stop], [], count)
        assert set(tokens(found)) <= set(text[:stop])


# What is learned


def test_guesses_that_were_always_wrong_are_thought_unlikely_and_tried_again_later():
    guess, other = Guess(0, 3), Guess(0, 4)
    calibration, before = Calibration(), Calibration().likelihood(guess)
    for _ in range(60):
        calibration.saw(guess, is_right=False)
    assert calibration.likelihood(guess) < 0.1 < calibration.likelihood(other) == before
    passed = 0
    while calibration.likelihood(guess) < 0.1:
        calibration.forget()
        passed += 1
    assert 50 < passed < 2000


def test_what_was_seen_last_counts_most():
    calibration = Calibration(CalibrationLimits(memory=8))
    for is_right in [True] * 50 + [False] * 8:
        calibration.saw(Guess(0, 0), is_right=is_right)
    assert calibration.likelihood(Guess(0, 0)) < 0.5


@given(st.integers(0, 1000), st.floats(-2, 2), st.sampled_from(("sure", "unsure", "silent")))
def test_likelihoods_are_as_often_right_as_they_say(seed, shift, kind):
    """Whether a draft is too sure, not sure enough, or says nothing."""
    rng, calibration = Random(seed), Calibration()
    expected = right = 0.0
    for seen in range(400):
        said = {"sure": rng.uniform(0.5, 0.98), "unsure": rng.uniform(0.05, 0.5), "silent": 0.6}[kind]
        guess = Guess(0, 0, None if kind == "silent" else said)
        is_right = rng.random() < 1 / (1 + (1 - said) / said * exp(-shift))
        if seen >= 100:  # the first ones teach
            expected += calibration.likelihood(guess)
            right += is_right
        calibration.saw(guess, is_right=is_right)
    assert abs(expected - right) < 0.1 * 300


def test_a_draft_that_says_impossible_things_costs_no_error():
    calibration = Calibration()
    for said in (0.0, 1.0):
        for is_right in [True] * 200 + [False] * 200:
            calibration.saw(Guess(0, 0, said), is_right=is_right)
            assert 0 < calibration.likelihood(Guess(0, 0, said)) < 1


def test_a_draft_that_says_how_sure_it_is_begins_its_next_text_with_half_of_what_was_learned():
    said, silent, texts = Guess(0, -1, 0.5), Guess(0, 3), Calibrations()
    first, new = texts.next(), Calibration()
    for _ in range(30):
        first.saw(said, is_right=True)
        first.saw(silent, is_right=True)
    second = texts.next()
    assert new.likelihood(said) < second.likelihood(said) < first.likelihood(said)
    assert second.likelihood(silent) == new.likelihood(silent) < first.likelihood(silent)
    learned = first.likelihood(said)
    second.saw(said, is_right=False)
    assert first.likelihood(said) == learned


def test_a_draft_that_was_always_wrong_is_tried_again_in_other_texts():
    guess, texts = Guess(0, -1, 0.5), Calibrations()
    text = texts.next()
    for _ in range(200):
        text.saw(guess, is_right=False)
    assert text.likelihood(guess) < 0.02
    assert max(texts.next().likelihood(guess) for _ in range(3)) > 0.1


# In flight


class Route:
    """Servers: they hold tokens, and answer a position with all tokens up to it."""

    def __init__(self):
        self.held = []
        self.restarts = 0

    def send(self, frame):
        assert frame.start <= len(self.held), "tokens are missing"
        self.restarts += frame.start < len(self.held)
        self.held[frame.start :] = frame.tokens
        frame.answer = [tuple(self.held[: frame.start + n + 1]) for n in range(len(frame.tokens))]


@given(st.integers(0, 10_000), st.sampled_from((0.0, 0.5, 0.9, 1.0)))
def test_every_output_is_that_of_the_text(seed, right):
    """However often guesses are right, and whenever frames are sent."""
    rng, route = Random(seed), Route()
    pipe = Pipe(LIMITS, Calibration())
    truth = [rng.randrange(5) for _ in range(120)]
    pipe.restart(0, truth[:3])
    route.held = truth[:3]
    for position in range(3, 80):
        if rng.random() < 0.05 and position > 10:
            keep = len(pipe.text) - rng.randrange(1, 4)
            pipe.restart(keep)
            truth[keep:] = [rng.randrange(5) for _ in truth[keep:]]
        text = len(pipe.text)
        is_there = pipe.feed(truth[text])
        while True:
            ahead = text + 1 + len(pipe.guesses)
            wanted = [token if rng.random() < right else 9 for token in truth[ahead : ahead + pipe.room]]
            guesses = [(Guess(token, 0), 1.0) for token in wanted[: rng.randrange(len(wanted) + 1)]]
            if is_there and not guesses:
                break
            route.send(pipe.frame(guesses))
            is_there = True
        frame = pipe.covering(text)
        assert frame.answer[text - frame.start] == tuple(truth[: text + 1])
        assert len(pipe.guesses) <= LIMITS.tokens_max
    assert pipe.counts.tokens == 77
    assert pipe.counts.right + pipe.counts.trips == 77


def test_a_wrong_guess_drops_all_behind_it():
    pipe, route = Pipe(LIMITS, Calibration()), Route()
    pipe.restart(0, [1])
    route.held = [1]
    assert not pipe.feed(2)
    route.send(pipe.frame([(Guess(3, 0), 1.0), (Guess(4, 0), 1.0)]))
    route.send(pipe.frame([(Guess(5, 0), 1.0)]))
    assert pipe.feed(3)
    assert not pipe.feed(7)
    assert pipe.guesses == []
    frame = pipe.frame([])
    assert (frame.start, frame.tokens) == (3, (7,))


def test_tokens_that_were_not_guessed_travel_in_one_frame():
    """As those do that a grammar forces."""
    pipe, route = Pipe(LIMITS, Calibration()), Route()
    pipe.restart(0, [1])
    route.held = [1]
    pipe.feed(2)
    route.send(pipe.frame([(Guess(3, 0), 1.0), (Guess(4, 0), 1.0)]))
    for token in (3, 7, 8):
        pipe.feed(token)
    assert pipe.unsent == 2
    frame = pipe.frame([(Guess(9, 0), 1.0)])
    assert (frame.start, frame.tokens) == (3, (7, 8, 9))
    assert pipe.unsent == 0
    assert pipe.feed(9)
    assert pipe.unsent == 0


def test_tokens_of_a_plain_step_are_in_no_frame():
    pipe = Pipe(LIMITS, Calibration())
    pipe.restart(0, [1])
    pipe.feed(2)
    pipe.plain()
    assert pipe.unsent == 0
    pipe.feed(3)
    frame = pipe.frame([])
    assert (frame.start, frame.tokens) == (2, (3,))
    assert pipe.counts.computed == 2


def test_no_guess_lies_behind_the_last_position():
    pipe = Pipe(LIMITS, Calibration(), positions_max=5)
    pipe.restart(0, [1, 2])
    pipe.feed(3)
    assert pipe.room == 2
    pipe.frame([(Guess(4, 0), 1.0), (Guess(5, 0), 1.0)])
    assert pipe.room == 0
    assert pipe.guessed(Lookup()) == []


def test_room_is_left_until_a_frame_is_worth_it():
    pipe = Pipe(LIMITS, Calibration())
    pipe.restart(0, [1])
    pipe.feed(2)
    for _ in range(3):
        pipe.frame([(Guess(0, 0), 1.0)] * pipe.room)
    assert len(pipe.guesses) == LIMITS.tokens_max
    assert pipe.room == 0
    assert pipe.feed(0)
    assert pipe.room == 0  # for one
    assert pipe.slow_room == 0
    pipe.gathered = 1
    assert pipe.slow_room == 1
    assert pipe.feed(0)
    assert pipe.room == LIMITS.frame_tokens_min


@pytest.mark.parametrize("likelihood", [0.01, 0.1, 1.0])
def test_guesses_end_where_the_text_hardly_gets(likelihood):
    pipe = Pipe(LIMITS, Calibration(CalibrationLimits(prior_right=likelihood)))
    pipe.restart(0, [1])
    pipe.feed(2)
    count = {0.01: 0, 0.1: 1, 1.0: 4}[likelihood]
    chosen = pipe.likely([Guess(0, 0)] * 4)
    assert len(chosen) == count
    if chosen:
        pipe.frame(chosen)
        assert len(pipe.likely([Guess(0, 0)] * 4)) == (0 if likelihood < 1 else 4)  # those in flight count


def test_a_draft_is_right_more_often_than_it_says_until_it_shows_otherwise():
    calibration = Calibration()
    assert calibration.likelihood(Guess(0, -1, 0.5)) == pytest.approx(0.731, abs=0.001)
    assert calibration.likelihood(Guess(0, 3)) == pytest.approx(0.6)  # look-up says nothing
    for n in range(400):
        calibration.saw(Guess(0, -1, 0.5), is_right=n % 2 == 0)
    assert calibration.likelihood(Guess(0, -1, 0.5)) == pytest.approx(0.5, abs=0.05)
