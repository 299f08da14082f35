"""Audits that disagree now and then show together which server is wrong at times, and blame no other one."""

from collections.abc import Mapping, Sequence
from random import Random

import pytest

from swarm.client.auditing.odds import Observation, OddsLimits, unsteady

AUDITS = 400
Rates = Mapping[tuple[int, int], float]


def audit(random: Random, stages: int, holders: int, rates: Rates) -> Observation | None:
    """Two routes with no server in common; None where both have one that is wrong."""
    routes = []
    for _ in range(2):
        taken = routes[0] if routes else [(stage, -1) for stage in range(stages)]
        free = [[n for n in range(holders) if n != other] for _, other in taken]
        routes.append([(stage, random.choice(of)) for stage, of in enumerate(free)])
    names = [frozenset(map(str, route)) for route in routes]
    is_off = [any(random.random() < rates.get(server, 0.0) for server in route) for route in routes]
    match is_off:
        case [False, False]:
            return Observation(names[0] | names[1])
        case [True, False]:
            return Observation(frozenset(), names[0])
        case [False, True]:
            return Observation(names[0], names[1])
    return None


def found(seed: int, stages: int, holders: int, rates: Rates) -> tuple[str | None, int]:
    """The server that is found first, and in how many audits it was until then."""
    random, seen = Random(seed), list[Observation]()
    for _ in range(AUDITS):
        if (each := audit(random, stages, holders, rates)) is None:
            continue
        seen.append(each)
        if each.company and (server := unsteady(seen)) is not None:
            return server, sum(server in one.right | one.company for one in seen)
    return None, 0


@pytest.mark.parametrize(("stages", "holders"), [(2, 3), (3, 4)])
def test_a_server_that_is_wrong_in_half_of_its_audits_is_found_within_fifty(stages: int, holders: int) -> None:
    for seed in range(10):
        server, audits = found(seed, stages, holders, {(1, 2): 0.46})
        assert (server, audits <= 50) == ("(1, 2)", True)


def test_of_several_that_are_wrong_at_times_none_is_taken_for_an_honest_one() -> None:
    rates = {(0, 0): 0.3, (1, 0): 0.3, (2, 0): 0.1}
    servers = [found(seed, 3, 5, rates)[0] for seed in range(5)]
    assert {*servers} <= {str(server) for server in rates}


def test_a_server_that_is_always_beside_the_same_other_one_is_not_found() -> None:
    together = Observation(frozenset(), frozenset({"a", "b"}))
    assert unsteady([together] * 50) is None


def beside_one_other(seed: int) -> list[Observation]:
    """Audits of six servers before two. The liar, one of the two, is wrong only behind "first 0"."""
    random, seen = Random(seed), list[Observation]()
    for _ in range(300):
        first, reference = (f"first {n}" for n in random.sample(range(6), 2))
        second, other = random.sample(["liar", "honest"], 2)
        routes = frozenset({first, second}), frozenset({reference, other})
        off = [{"first 0", "liar"} == route for route in routes]
        right = frozenset[str]().union(*(route for route, is_off in zip(routes, off, strict=True) if not is_off))
        seen.append(Observation(right, routes[off.index(True)] if any(off) else frozenset()))
    return seen


@pytest.mark.parametrize("seed", range(5))
def test_a_server_that_lies_only_beside_an_honest_one_gets_it_not_found(seed: int) -> None:
    """The liar agrees beside five others, and the honest server beside one. So the fit blames the latter."""
    assert unsteady(beside_one_other(seed)) is None


def test_two_that_are_never_apart_hide_no_third_one() -> None:
    pair = Observation(frozenset(), frozenset({"a", "b"}))
    others = [frozenset({f"other {n % 4}"}) for n in range(24)]
    apart = [*map(Observation, others), *(Observation(frozenset(), other | {"c"}) for other in others)]
    assert unsteady([pair] * 40 + apart, OddsLimits(candidates_max=1)) == "c"


def test_too_few_audits_find_no_server() -> None:
    alone = Observation(frozenset(), frozenset({"a"}))
    assert unsteady([alone] * (OddsLimits().disputes_min - 1)) is None


def test_the_only_server_of_every_company_is_found() -> None:
    seen: Sequence[Observation] = [Observation(frozenset({str(n)}), frozenset({"a", str(n + 1)})) for n in range(12)]
    assert unsteady(seen[:2]) is None
    assert unsteady(seen) == "a"
