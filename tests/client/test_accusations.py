"""The course of an inquest, replay by replay: the next question, and the conclusions of each answer."""

from collections.abc import Mapping
from typing import Any

import pytest

from swarm.blocks import Blocks
from swarm.client.auditing.inquest import Ask, InquestLimits, Replay, Verdict, inquest
from swarm.client.auditing.ledger import Ledger
from swarm.client.planning.route import Hop
from tests.client.test_inquest import hop, names

S, R, T, U, V, W, X = (hop(0, 12) for _ in range(7))
A, B, C = ROUTE = hop(0, 4), hop(4, 8), hop(8, 12)
OTHER_B, THIRD_B = hop(4, 8), hop(4, 8)
D, E = hop(0, 6), hop(6, 12)
LIMITS = InquestLimits()


class Course:
    """An inquest whose replays a test answers. ask: the replay that is wanted. verdict: None until the end."""

    def __init__(self, *route: Any, told: str) -> None:
        def agree(one: Replay, other: Replay) -> bool:
            return one.outputs == other.outputs

        self._course = inquest(Replay(route, self._outputs(told)), agree, LIMITS)
        self.ask: Ask = next(self._course)
        self.verdict: Verdict | None = None

    def answer(self, output: str | None, *route: Any) -> None:
        """Answer the replay with an output, or with None: it cannot be had. route: default: the hops that are kept."""
        assert self.verdict is None, "nothing is asked any more"
        replay = None if output is None else Replay(route or self.ask.kept, self._outputs(output))
        try:
            self.ask = self._course.send(replay)
        except StopIteration as end:
            self.verdict = end.value

    @staticmethod
    def _outputs(output: str) -> Mapping[int, Any]:
        return {0: output}


def contradicted(*route: Any, reference: tuple[Any, ...]) -> Course:
    """The route told "s"; a reference that repeats itself computes "r"."""
    course = Course(*route, told="s")
    course.answer("r", *reference)
    course.answer("r")
    return course


def accused() -> Course:
    """S told "s", and does so in the reference's place, too. A third holder is asked next."""
    course = contradicted(S, reference=(R,))
    assert course.ask == Ask((S,))
    course.answer("s")
    return course


def against() -> Course:
    """A third holder agrees with the reference. S is asked again next."""
    course = accused()
    course.answer("r", T)
    assert course.ask == Ask((S,))
    return course


# The third holder


def test_third_holder_is_none_of_the_two() -> None:
    assert accused().ask == Ask((), names(S, R))


def test_third_holder_that_agrees_with_the_accused_clears_it() -> None:
    course = accused()
    course.answer("s", T)
    assert course.verdict == Verdict(cleared=names(S), wrong=names(R))


def test_one_of_several_that_a_third_holder_contradicts_is_doubted() -> None:
    course = contradicted(S, reference=(D, E))
    course.answer("s")
    course.answer("s", T)
    assert course.verdict == Verdict(cleared=names(S), doubted=names(D, E))


def test_third_holders_that_differ_are_asked_within_bounds_and_show_nothing() -> None:
    course, asked = accused(), [S, R]
    for number, third in enumerate((T, U, V, W, X)):
        assert course.verdict is None
        assert course.ask == Ask((), names(*asked))
        course.answer(f"other {number}", third)
        asked.append(third)
    assert course.verdict == Verdict(unclear=names(*asked))
    assert LIMITS.thirds_max == 5


def test_hops_beside_a_third_holder_are_not_suspected() -> None:
    course = Course(*ROUTE, told="s")
    for _ in (ROUTE, A):
        course.answer(None)  # no route without them
    course.answer("r", A, OTHER_B, C)
    course.answer("r")
    assert course.ask == Ask(ROUTE)
    course.answer("s")
    course.answer("other", A, THIRD_B, C)
    course.answer(None)
    assert course.verdict == Verdict(unclear=names(B, OTHER_B, THIRD_B))


# An accusation is repeated


def test_server_that_is_wrong_in_the_same_way_twice_is_wrong() -> None:
    course = against()
    course.answer("s")
    assert course.verdict == Verdict(cleared=names(R), wrong=names(S))


def test_server_that_is_wrong_otherwise_each_time_is_wrong() -> None:
    course = against()
    for number in range(LIMITS.repeats_min - 1):
        assert course.verdict is None
        assert course.ask == Ask((S,))
        course.answer(f"wrong {number}")
        assert course.ask == Ask((R,))
        course.answer("r")
    assert course.verdict == Verdict(cleared=names(R), wrong=names(S))


@pytest.mark.parametrize("answer", [None, "r"], ids=["is gone", "is right"])
@pytest.mark.parametrize("rounds", range(LIMITS.repeats_min - 1))
def test_server_that_is_not_wrong_again_is_doubted(answer: str | None, rounds: int) -> None:
    course = against()
    for number in range(rounds):
        course.answer(f"wrong {number}")
        course.answer("r")
    course.answer(answer)
    assert course.verdict == Verdict(doubted=names(S, R))


@pytest.mark.parametrize("answer", [None, "otherwise"], ids=["is gone", "differs"])
def test_reference_that_does_not_repeat_itself_gets_no_other_one_blamed(answer: str | None) -> None:
    course = against()
    course.answer("wrong once more")
    assert course.ask == Ask((R,))
    course.answer(answer)
    assert course.verdict == Verdict(doubted=names(S, R))


@pytest.mark.parametrize(("elsewhere", "is_wrong"), [(None, False), ("r", False), ("wrong there, too", True)])
def test_server_that_is_wrong_otherwise_each_time_may_have_a_wrong_one_beside_it(
    elsewhere: str | None, is_wrong: bool
) -> None:
    behind = hop(4, 12)
    course = contradicted(A, behind, reference=(R,))
    course.answer("wrong")
    course.answer("r", T, *course.ask.kept)
    for number in range(LIMITS.repeats_min - 1):
        course.answer(f"wrong {number}")
        course.answer("r")
    while course.ask.without == names(R):
        course.answer(elsewhere, A, U)
        if is_wrong:
            assert course.ask == Ask((U,), names(A, R)), "another server in its place between the same hops"
            course.answer("r", V, U)
    course.answer("r")  # behind makes no difference
    verdict = course.verdict
    assert verdict is not None
    assert (verdict.wrong, verdict.doubted) == ((names(A), names()) if is_wrong else (names(), names(A, R)))


@pytest.mark.parametrize(
    ("control", "again", "is_wrong"),
    [
        (None, (), False),
        ("s", (), False),
        ("other", ("other", "s"), True),
        ("other", ("otherwise",), False),
        ("other", ("other", "otherwise"), False),
        ("other", ("other", None), False),
    ],
    ids=["none", "makes no difference", "difference", "its others differ", "it differs itself", "is gone"],
)
def test_accused_between_others_is_compared_with_another_one_there(
    control: str | None, again: tuple[str | None, ...], is_wrong: bool
) -> None:
    course = contradicted(A, E, reference=(D, R))
    course.answer("wrong", A, Hop(D.signed, Blocks(4, 6)), R)
    course.answer("r", T, *course.ask.kept)
    course.answer("wrong")
    rounds = 0
    while course.ask == Ask((A,), names(D, R)):
        rounds += 1
        course.answer("s", A, U)
        assert course.ask == Ask((U,), names(A, D, R))
        course.answer(control, V, U)
        for route, each in zip(((V, U), (A, U)), again, strict=False):
            assert course.ask == Ask(route)
            course.answer(each)
    assert rounds == (1 if is_wrong else LIMITS.repeats_min)
    course.answer("r")  # E makes no difference
    verdict = course.verdict
    assert verdict is not None
    assert (verdict.wrong, verdict.doubted) == ((names(A), names()) if is_wrong else (names(), names(A, D, R)))


# References


@pytest.mark.parametrize("again", [None, "otherwise"], ids=["is gone", "differs"])
def test_servers_of_references_that_do_not_repeat_themselves_are_suspects(again: str | None) -> None:
    course = Course(S, told="s")
    for reference, without in ((R, (S,)), (T, (S, R)), (U, (S, R, T))):
        assert course.ask == Ask((), names(*without))
        course.answer("r", reference)
        assert course.ask == Ask((reference,))
        course.answer(again if reference is not U else "r")
    asked = []
    while course.ask.kept != (S,) or not asked:
        asked.append(course.ask.kept)
        course.answer("r")
    assert asked == [(S,), (R,), (T,)]  # each by itself in the place of the steady one


def test_references_are_asked_within_bounds() -> None:
    course, asked = Course(S, told="s"), [S]
    while course.verdict is None:
        if course.ask.kept:
            course.answer("otherwise")
        else:
            asked.append(hop(0, 12))
            course.answer("r", asked[-1])
    assert len(asked) == 1 + LIMITS.references_max
    assert course.verdict == Verdict(unclear=names(*asked))


def test_session_that_a_steady_reference_agrees_with_is_cleared() -> None:
    course = Course(S, told="s")
    course.answer("wrong", R)
    course.answer("otherwise")
    course.answer("s", T)
    course.answer("s")
    assert course.ask == Ask((R,))  # S is no suspect any more
    course.answer("s")
    assert course.verdict == Verdict(cleared=names(S, T), doubted=names(R))


def test_single_server_is_compared_with_one_reference() -> None:
    course = Course(S, told="s")
    course.answer(None)
    assert course.verdict == Verdict()


def beside() -> Course:
    """Only B has another holder, which makes a difference in the session's answers, and none in a replay."""
    course = Course(*ROUTE, told="s")
    for _ in (ROUTE, A):
        course.answer(None)
    course.answer("r", A, OTHER_B, C)
    course.answer("r")
    course.answer("r")
    assert course.ask == Ask(ROUTE)
    return course


def test_a_hop_of_both_routes_is_in_doubt_with_the_others() -> None:
    """It may have been wrong once, in one of them."""
    course = beside()
    course.answer(None)
    assert course.verdict == Verdict(doubted=names(A, B, C))


def test_route_that_stands_by_its_answers_leaves_the_references_servers() -> None:
    course = beside()
    course.answer("s")
    assert course.ask == Ask((A, OTHER_B, C))
    course.answer(None)  # shows nothing
    assert course.verdict == Verdict(doubted=names(A, OTHER_B, C))


# Several verdicts


def of_two(first: str | None, second: str | None) -> Verdict | None:
    """A and a hop behind it contradict R, one after the other. first, second: the answers of their third holders."""
    behind = hop(4, 12)
    names_of = {A.process: "A", behind.process: "B", R.process: "R"}
    course = contradicted(A, behind, reference=(R,))
    for third in (first, second):
        course.answer("s")
        course.answer(third, *course.ask.kept, T)
        if third == "r":
            course.answer("s")  # wrong again
        if third is not None:
            assert course.ask.without == names(R), "the one that others contradict is asked for between others"
            wrong = course.ask.kept
            course.answer("s" if third == "r" else "r", *wrong, U)  # and wrong there, too
            assert course.ask == Ask((U,), names(*wrong, R))
            course.answer(third, *wrong, U)  # others in its place are right there
    verdict = course.verdict
    return verdict and Verdict(
        *(frozenset(map(names_of.__getitem__, of)) for of in (verdict.cleared, verdict.wrong, verdict.doubted))
    )


def test_wrong_server_is_neither_cleared_nor_doubted_by_another_verdict() -> None:
    assert of_two("r", "s") == Verdict(cleared=frozenset("B"), wrong=frozenset("AR"))
    assert of_two(None, "s") == Verdict(cleared=frozenset("B"), wrong=frozenset("R")), "R explains the doubt of A"


def test_doubted_server_is_not_cleared_by_another_verdict() -> None:
    assert of_two("r", None) == Verdict(wrong=frozenset("A"), doubted=frozenset("BR"))


def test_three_doubts_that_share_one_server_show_it() -> None:
    ledger = Ledger()
    assert not ledger.note(Verdict(doubted=frozenset({"a/1", "b/1"})))
    assert not ledger.note(Verdict(doubted=frozenset({"b/1", "d/1"})))
    assert ledger.note(Verdict(doubted=frozenset({"b/1", "c/1"}))) == {"b/1"}
