"""One fifth of the servers boasts and computes wrongly: audits find those that a client meets, and blame no other."""

from random import Random

import pytest

from swarm.blocks import Blocks
from tests.simulation.customer import Customer, lying_weather_of, wrong_sessions_most
from tests.simulation.liars import LyingSpan
from tests.simulation.model import HashSpan, embed
from tests.simulation.run import simulate
from tests.simulation.world import Weather
from tests.support.often import rest_is_long

LIARS = 0.2


class Regular(Customer):
    """Comes a few times."""

    sessions = 10


@pytest.mark.slow("ten sessions, and audits of half of them, each with many replays")
@pytest.mark.parametrize("seed", rest_is_long([1, 2, 3, 5, 6, 9], [3]))  # sessions of others meet no liar
def test_liars_are_found_by_audits_and_no_honest_server_is_blamed(seed):
    outcome = simulate(seed, 0.0, lying_weather_of(Weather(), LIARS), user=Regular)
    assert outcome.good, (outcome.error, outcome.faults, outcome.slandered)
    assert outcome.sessions == Regular.sessions, "a session did not complete"
    assert outcome.met, "no session has met a liar: nothing was tried"
    assert outcome.found, "no liar was found"
    assert outcome.wrong_sessions <= wrong_sessions_most([outcome])


def test_a_liar_is_wrong_in_the_same_way_each_time_and_only_at_its_share_of_the_positions():
    hidden, blocks = embed([list(range(400))]), Blocks(0, 2)
    true = HashSpan(blocks).forward(hidden, cache=HashSpan(blocks).new_cache())
    for share in (0.0, 0.25, 1.0):
        told = [
            span.forward(hidden, cache=span.new_cache())
            for span in (LyingSpan(blocks, Random("liar"), share), LyingSpan(blocks, Random("liar"), share))
        ]
        wrong = (told[0] != true).any(-1).float().mean()
        assert (told[0] == told[1]).all()
        assert wrong == pytest.approx(share, abs=0.07)
