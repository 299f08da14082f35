"""Whole swarms on a virtual clock: servers come and go, and not one token differs."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from swarm.errors import ClockSkew
from tests.simulation.__main__ import replay
from tests.simulation.mutations import MUTATIONS
from tests.simulation.run import Outcome, simulate, weather_of
from tests.simulation.world import Weather
from tests.support.often import rest_is_long

SEEDS = 200
OFTEN = 5  # of them in `make test`
PART = 5  # seeds of one test
SLOW, FAST = 6.0, 60.0  # departures a minute, among a hundred servers
FIRST = {"accept_a_stale_epoch": 26}  # the seed that is tried first: those before it notice nothing
TREE = Path(__file__).parents[2]


def described(outcomes: list[Outcome]) -> str:
    return "\n".join(f"{o.error or o.faults or o.wrong}: {replay(o)}" for o in outcomes)


@pytest.mark.parametrize("first", rest_is_long(range(0, SEEDS, PART), range(0, OFTEN, PART)))
def test_no_token_differs_and_nothing_hangs_whatever_fails(first):
    outcomes = [simulate(seed, SLOW if seed % 2 else FAST) for seed in range(first, first + PART)]
    bad = [outcome for outcome in outcomes if not outcome.good]
    assert not bad, described(bad)
    assert any(outcome.repairs for outcome in outcomes)  # or nothing was tried


@pytest.mark.parametrize("first", rest_is_long(range(0, 40, 2), [0]))
def test_routes_of_several_classes_are_repaired_within_their_tier(first):
    """So few servers are there that some repairs find none of the same class."""
    lines: list[str] = []
    seeds = range(first, first + 2)
    mixed = {seed: replace(weather_of(seed, FAST), servers=40, rounded=0.4) for seed in seeds}
    outcomes = [simulate(seed, FAST, mixed[seed], lines) for seed in seeds]
    bad = [outcome for outcome in outcomes if not outcome.good]
    assert not bad, described(bad)
    assert first or any("repaired in another numeric class" in line for line in lines)


@pytest.mark.parametrize("seed", [131, 6422])
def test_what_ten_thousand_seeds_found(seed):
    """A hop died while a step waited for room: nobody was told, and the step waited for ever."""
    outcome = simulate(seed, FAST)
    assert outcome.good, described([outcome])


@pytest.mark.long
@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_seed_replays_byte_for_byte_in_another_process(hash_seed):
    """And twice in one process: nothing is left over from the first run."""
    first = simulate(3, FAST)
    assert first.events > 1000
    program = "from tests.simulation.run import simulate; print(*[simulate(seed, 60.0).digest for seed in (3, 3, 4)])"
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(TREE)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    same, again, other = done.stdout.split()
    assert same == again == first.digest != other


@pytest.mark.long
def test_many_seeds_run_in_processes_of_their_own(tmp_path):
    line = [sys.executable, "-m", "tests.simulation", "--seeds", "0:2", "--departures", "6", "--jobs", "2"]
    subprocess.run([*line, "--results", tmp_path], cwd=TREE, check=True)
    (results,) = tmp_path.iterdir()
    assert len(results.read_text().splitlines()) == 2


@pytest.mark.parametrize("mutation", rest_is_long(MUTATIONS, MUTATIONS[8::8]), ids=lambda mutation: mutation.__name__)
def test_a_repair_that_is_broken_on_purpose_is_noticed(mutation, monkeypatch):
    mutation(monkeypatch)
    first = FIRST.get(mutation.__name__, 0)
    assert any(not simulate(seed, FAST).good for seed in (*range(first, SEEDS), *range(first)))


FAULTS = {
    "crashes": Weather(departures_per_min=FAST, stalls=0.0, vanishes=0.0, leaves=0.0),
    "machines that vanish": Weather(departures_per_min=FAST, stalls=0.0, vanishes=1.0, leaves=0.0),
    "stalls": Weather(departures_per_min=FAST, stalls=1.0),
    "leaving in good order": Weather(departures_per_min=FAST, stalls=0.0, leaves=1.0),
    "partitions": Weather(partitions_per_min=60.0),
    "disorder": Weather(disorder=0.01),
    "slow links": Weather(departures_per_min=SLOW, slow_links=0.3),
    "skewed clocks": Weather(departures_per_min=FAST, skew_s=15.0),
    "wrong clocks": Weather(departures_per_min=FAST, wrong_clocks=0.5),
    "refusals": Weather(departures_per_min=SLOW, refusals=0.5),
    "full pools": Weather(departures_per_min=SLOW, tight_pools=0.3),
    "lost announcements": Weather(departures_per_min=FAST, lost_announcements=0.3),
}


@pytest.mark.parametrize(
    ("fault", "seed"), rest_is_long(product(FAULTS, range(1000, 1003)), [(f, 1000) for f in FAULTS])
)
def test_every_fault_alone(fault, seed):
    outcomes = [simulate(seed, FAULTS[fault].departures_per_min, FAULTS[fault])]
    bad = [outcome for outcome in outcomes if not outcome.good]
    assert not bad, [(o.seed, o.error, o.faults, o.wrong) for o in bad]


def test_clock_that_is_five_minutes_off_is_refused_by_name():
    lines: list[str] = []
    outcome = simulate(0, 0.0, Weather(wrong_clocks=0.3), lines)
    assert outcome.good
    assert outcome.skewed > 10
    text = str(ClockSkew(skew_s=300.0))
    assert any(text in line for line in lines)
