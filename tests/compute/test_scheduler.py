"""Which tasks run next: turns, budgets, debts and lingering, on passed-in time."""

import gc
import hashlib
import json
import weakref
from collections import Counter
from dataclasses import replace

import pytest

from swarm.compute.limits import SchedulerLimits
from swarm.compute.scheduler import Idle, Scheduler
from tests.compute.support import Fake, Tenure, finish, iteration, simulate

# Digests of every batch and delivery that the version before chose for these arrivals.
BEFORE = {
    0: "f842db4c00536650",
    2: "d950f947b737adea",
    3: "6297863e8a2bcb74",
    6: "d292cef882e6f45a",
    9: "baa9a72edfd0d176",
}
LIMITS = SchedulerLimits()
BEFORE_LIMITS = replace(  # that version knew no bursts, and gave odd sessions all turns
    LIMITS, costs=replace(LIMITS.costs, own_s=0.0), batch=replace(LIMITS.batch, odd_turns=1 << 30)
)


class Fixed:
    """Costs that grant every iteration the same budget, and note the rest."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.asked: list[tuple[int, bool]] = []
        self.observed: list[tuple[int, int]] = []

    def prefill_tokens(self, beside: int, *, decoding: bool, stretch: float = 0.0) -> int:
        self.asked.append((beside, decoding))
        return self.tokens

    def observe(self, decodes: int, prefill_tokens: int, took_s: float) -> None:
        self.observed.append((decodes, prefill_tokens))


def granting(tokens: int, limits: SchedulerLimits = LIMITS) -> Scheduler:
    """A scheduler whose iterations have a fixed budget."""
    return Scheduler(limits, lambda _: Fixed(tokens))


@pytest.mark.long
def test_batches_are_those_of_the_version_before():
    for seed, digest in BEFORE.items():
        log = simulate(seed, Scheduler(BEFORE_LIMITS))
        assert hashlib.sha256(json.dumps(log).encode()).hexdigest()[:16] == digest, seed


def test_nothing_runs_while_nothing_waits():
    scheduler = Scheduler()
    assert scheduler.form(0.0) == Idle(float("inf"))
    scheduler.add(step := Fake("a"), 0.0)
    assert iteration(scheduler) == [(step, 1)]
    assert scheduler.form(0.0) == Idle(float("inf"))


def test_a_sessions_tasks_run_in_order():
    scheduler, tenure = Scheduler(), Tenure()
    tasks = [Fake("a", tokens, tenure=tenure) for tokens in (3, 1, 1)]
    for task in tasks:
        scheduler.add(task, 0.0)
    assert [iteration(scheduler) for _ in range(4)] == [[(tasks[0], 3)], [(tasks[1], 1)], [(tasks[2], 1)], []]


def test_steps_of_two_sessions_run_together():
    scheduler = Scheduler()
    for owner in "ab":
        scheduler.add(Fake(owner), 0.0)
    assert len(iteration(scheduler)) == 2


def test_a_window_runs_with_steps_and_does_not_wait_for_a_budget():
    scheduler = granting(0)
    tasks = [Fake("a"), Fake("b", 4, has_past=True), Fake("c", 400, has_past=True)]
    for task in tasks:
        scheduler.add(task, 0.0)
    assert iteration(scheduler) == [(tasks[0], 1), (tasks[1], 4)]


def test_costs_are_learned_by_the_tokens_of_steps():
    costs = Fixed(16)
    scheduler = Scheduler(LIMITS, lambda _: costs)
    for task in (Fake("a"), Fake("b", 4, has_past=True), Fake("c", 400)):
        scheduler.add(task, 0.0)
    iteration(scheduler)
    assert costs.asked == [(5, True)]
    assert costs.observed == [(5, 16)]


def test_a_skipped_task_is_over_in_its_turn_and_costs_no_iteration():
    scheduler, tenure = Scheduler(), Tenure()
    first, skipped, last = (Fake("a", tenure=tenure, has_past=True) for _ in range(3))
    for task in (first, skipped, last):
        scheduler.add(task, 0.0)
    skipped.is_skipped = True
    assert finish(scheduler, scheduler.form(0.0, linger=False)) == [first]
    batch = scheduler.form(0.0, linger=False)
    assert [part.task for part in batch.parts] == [last]
    assert finish(scheduler, batch) == [skipped, last]


def asked_for(decoding: str, prompts: str, n: int, *, replays: bool = False) -> list[tuple[bool, float]]:
    """Whether a session counts as decoding, and the stretch, while one of each peer steps beside prompts, or pasts."""
    asked: list[tuple[bool, float]] = []

    class Noting(Fixed):
        def prefill_tokens(self, beside: int, *, decoding: bool, stretch: float = 0.0) -> int:
            asked.append((decoding, stretch))
            return super().prefill_tokens(beside, decoding=decoding, stretch=stretch)

    scheduler = Scheduler(LIMITS, lambda _: Noting(16))
    for owner in decoding:
        scheduler.add(Fake(owner), 0.0)
    for _ in range(n):
        scheduler.add(Fake(prompts, 64, replays=replays), 0.0)
    iteration(scheduler)
    return asked


def test_a_peers_waiting_prompts_may_delay_its_own_steps():
    assert asked_for("a", "a", 9) == [(True, 8.0)]
    assert asked_for("aa", "a", 9) == [(True, 4.0)]  # of two sessions' steps
    assert asked_for("a", "a", 1) == [(True, 0.0)]  # a prompt alone has the share that it always had


def test_prompts_of_one_peer_do_not_delay_anothers_steps():
    assert asked_for("a", "b", 9) == [(True, 0.0)]
    assert asked_for("ab", "a", 9) == asked_for("ba", "a", 9) == [(True, 0.0)]


def test_a_peers_lost_pasts_come_before_its_own_steps():
    assert asked_for("aa", "a", 1, replays=True) == [(False, 0.0)]
    assert asked_for("ab", "a", 9, replays=True) == asked_for("b", "a", 9, replays=True) == [(True, 0.0)]


@pytest.mark.parametrize(("away", "steps"), [("a", ""), ("b", "a")])
def test_sessions_that_are_expected_back_limit_pasts_of_other_peers_alone(away: str, steps: str):
    scheduler = granting(64)
    tenure = Tenure()  # kept: a session that is gone is not expected
    scheduler.add(Fake(away, tenure=tenure), 0.0)
    iteration(scheduler)
    for owner in steps:
        scheduler.add(Fake(owner), 0.1)
    scheduler.add(Fake("a", 64, replays=True), 0.1)
    assert scheduler.form(0.1, linger=False).budget.decoding == (away == "b")


def test_a_past_that_is_back_delays_no_step():
    scheduler, past = granting(64), Fake("a", 64, replays=True)
    scheduler.add(past, 0.0)
    assert iteration(scheduler) == [(past, 64)]
    assert not scheduler._queues.replaying
    scheduler.add(Fake("a", 64, replays=True, tenure=(gone := Tenure())), 0.0)
    gone.over = True
    iteration(scheduler)
    assert not scheduler._queues.replaying


def test_a_lost_past_does_not_wait_for_its_peers_steps():
    for owner, waits in (("a", False), ("b", True)):
        scheduler, decoding = Scheduler(), Tenure()
        for turn in range(5):  # each step comes 5 ms after the one before
            scheduler.add(Fake("a", tenure=decoding), turn + 0.005)
            iteration(scheduler, now=turn + 1.0, took_s=0.02)
        scheduler.add(Fake(owner, 64, replays=True), 5.001)
        assert isinstance(scheduler.form(5.001), Idle) == waits


def test_sessions_expected_back_are_waited_for_a_moment():
    scheduler, a, b = Scheduler(), Tenure(), Tenure()
    for tenure in (a, b):
        scheduler.add(Fake("p", tenure=tenure), 0.0)
    iteration(scheduler, now=0.02, took_s=0.02)
    scheduler.add(Fake("p", tenure=a), 0.03)
    idle = scheduler.form(0.03)
    assert isinstance(idle, Idle)
    assert 0.03 < idle.until <= 0.03 + LIMITS.linger.step_s
    scheduler.add(Fake("p", tenure=b), 0.031)
    assert len(scheduler.form(0.031).parts) == 2


def test_lingering_ends_when_its_time_is_over():
    scheduler, a = Scheduler(), Tenure()
    for tenure in (a, Tenure()):
        scheduler.add(Fake("p", tenure=tenure), 0.0)
    iteration(scheduler, now=0.02, took_s=0.02)
    scheduler.add(Fake("p", tenure=a), 0.03)
    now, plan = 0.03, scheduler.form(0.03)
    while isinstance(plan, Idle):
        assert plan.until > now
        now, plan = plan.until, scheduler.form(plan.until)
    assert now <= 0.03 + LIMITS.linger.step_s
    assert len(plan.parts) == 1


@pytest.mark.parametrize(("tokens", "is_expected"), [(1, True), (5, False)])
def test_only_decoding_sessions_are_expected_back(tokens: int, is_expected: bool):
    """Else a peer that opens sessions and leaves them makes others wait after each prompt."""
    scheduler, tenure = Scheduler(), Tenure()
    for turn in range(3):
        scheduler.add(Fake("a", tokens, packs=False, tenure=tenure), turn + 0.001)
        iteration(scheduler, now=turn + 1.0)
    scheduler.add(Fake("other", 5), 3.0)
    assert isinstance(scheduler.form(3.0), Idle) == is_expected


def test_iterations_of_prefill_do_not_shorten_lingering():
    """A step waits for a share of the last iteration that delivered steps."""
    scheduler, a, b = Scheduler(), Tenure(), Tenure()
    for tenure in (a, b):
        scheduler.add(Fake("p", tenure=tenure), 0.0)
    iteration(scheduler, now=0.02, took_s=0.02)
    scheduler.add(Fake("q", 5), 0.02)
    iteration(scheduler, now=0.021, took_s=0.001)
    scheduler.add(Fake("p", tenure=a), 0.03)
    assert scheduler.form(0.03).until > 0.03 + LIMITS.linger.step_share * 0.001


def test_tasks_of_closed_sessions_are_dropped():
    """Else a peer that asks much and leaves makes others wait for outputs that do not count."""
    scheduler = Scheduler()
    closed = [Fake("leaves") for _ in range(3)]
    for task in [*closed, kept := Fake("stays")]:
        scheduler.add(task, 0.0)
    for task in closed:
        task.tenure.over = True
    batch = scheduler.form(0.0)
    assert [part.task for part in batch.parts] == [kept]
    assert finish(scheduler, batch) == [*closed, kept]


def test_dropped_tasks_alone_make_an_empty_batch():
    scheduler = Scheduler()
    scheduler.add(task := Fake("leaves"), 0.0)
    task.tenure.over = True
    batch = scheduler.form(0.0)
    assert not batch.parts
    assert finish(scheduler, batch) == [task]
    assert scheduler.form(0.0) == Idle(float("inf"))


def test_a_task_closed_while_it_runs_is_over():
    """Else its memory would be held for ever."""
    scheduler = Scheduler()
    scheduler.add(task := Fake("closes", 5000), 0.0)
    batch = scheduler.form(0.0)
    task.tenure.over = True
    assert finish(scheduler, batch) == [task]


def test_a_failed_task_is_over():
    scheduler = Scheduler()
    scheduler.add(task := Fake("fails", 5000), 0.0)
    assert finish(scheduler, scheduler.form(0.0), failed=[task]) == [task]


def test_peers_take_turns_and_finish_what_they_began():
    scheduler = granting(50)
    greedy = [Fake("greedy", 100, packs=False) for _ in range(3)]
    modest = Fake("modest", 100, packs=False)
    for task in (*greedy, modest):
        scheduler.add(task, 0.0)
    ran = [iteration(scheduler)[0][0] for _ in range(8)]
    assert ran == [greedy[0], modest, greedy[0], modest, *[greedy[1]] * 2, *[greedy[2]] * 2]


@pytest.mark.parametrize("odd", [1, 10, 40])
def test_odd_sessions_leave_the_others_every_second_iteration(odd):
    scheduler = Scheduler()
    lone = [Fake(f"odd {n}", packs=False) for n in range(odd)]
    packed = [Fake(f"ordinary {n}") for n in range(10)]
    for task in (*lone, *packed):
        scheduler.add(task, 0.0)
    of_packed = 0
    for turn in range(40):
        ran = [task for task, _ in iteration(scheduler, float(turn))]
        of_packed += ran[0].packs
        assert len(ran) == (10 if ran[0].packs else 1)
        for task in ran:  # each comes again at once
            scheduler.add(Fake(task.owner, packs=task.packs), float(turn))
    assert 19 <= of_packed <= 21


def test_tenants_of_a_peer_take_turns():
    scheduler = granting(50)
    greedy = [Fake("gateway", 100, tenure=Tenure(tenant="a")) for _ in range(3)]
    modest, other = Fake("gateway", 100, tenure=Tenure(tenant="b")), Fake("peer", 100)
    for task in (*greedy, modest, other):
        scheduler.add(task, 0.0)
    ran = [[task for task, _ in iteration(scheduler)] for _ in range(10)]
    assert [task for tasks in ran for task in tasks if task is not other][:4] == [greedy[0], modest, greedy[0], modest]
    assert sum(other in tasks for tasks in ran[:4]) == 4  # two tenants are no second peer


def test_a_long_queue_hides_no_other_tenant():
    scheduler = granting(16)
    for _ in range(1000):
        scheduler.add(Fake("gateway", 16, tenure=Tenure(tenant="a")), 0.0)
    scheduler.add(modest := Fake("gateway", 16, tenure=Tenure(tenant="b")), 0.0)
    ran = [task for _ in range(2) for task, _ in iteration(scheduler)]
    assert modest in ran


def test_a_long_queue_hides_no_other_peer():
    scheduler = granting(10**6)
    for _ in range(1000):
        scheduler.add(Fake("greedy", 100), 0.0)
    scheduler.add(Fake("modest", 100), 0.0)
    scheduler.add(Fake("decodes"), 0.0)
    ran = iteration(scheduler)
    assert {task.owner for task, _ in ran} == {"greedy", "modest", "decodes"}
    assert len(ran) <= LIMITS.prefills_seen + 1


def test_steps_and_prefill_that_run_alone_take_turns():
    scheduler, singles = granting(10), 0
    scheduler.add(Fake("one", 1000, packs=False), 0.0)
    for _ in range(6):
        scheduler.add(Fake("one", packs=False), 0.0)
        singles += iteration(scheduler)[0][0].tokens == 1
    assert 2 <= singles <= 4


def test_only_waiting_peers_keep_their_turn_beyond_the_limit():
    scheduler = granting(2, replace(LIMITS, peers_remembered=1))
    scheduler.add(waits := Fake("waits", 100, packs=False), 0.0)
    assert iteration(scheduler) == [(waits, 2)]
    for _ in range(2):  # later than the peer that waits, and forgotten
        scheduler.add(comes := Fake("comes and goes", 2, packs=False), 0.0)
        assert iteration(scheduler) == [(comes, 2)]
    scheduler.add(new := Fake("new", 2, packs=False), 0.0)
    assert iteration(scheduler) == [(new, 2)]
    assert iteration(scheduler) == [(waits, 2)]


def test_many_steps_that_run_alone_do_not_precede_anothers():
    """Masked steps, and parts of the span, cannot run with others: a peer could stop all others with them."""
    scheduler = Scheduler()
    for _ in range(20):
        scheduler.add(Fake("greedy", packs=False), 0.0)
    iteration(scheduler)
    scheduler.add(Fake("modest", packs=False), 0.0)
    assert [iteration(scheduler)[0][0].owner for _ in range(4)] == ["greedy", "modest", "greedy", "greedy"]


def test_a_tenure_waits_behind_no_other_of_its_peer():
    scheduler = granting(1)
    for _ in range(2 * LIMITS.prefills_seen):
        scheduler.add(Fake("evil", 100), 0.0)
    scheduler.add(mine := Fake("owner"), 0.0)
    assert mine in [task for task, _ in iteration(scheduler)]


def test_budgets_depend_on_the_steps_beside():
    costs = Fixed(8)
    scheduler = Scheduler(LIMITS, lambda _: costs)
    for task in (decodes := Fake("decodes", rows=3), Fake("prefills", 16)):
        scheduler.add(task, 0.0)
    assert len(iteration(scheduler)) == 2
    assert len(iteration(scheduler)) == 1
    assert costs.asked == [(3, True), (0, True)]  # the session that decoded is expected back
    assert not decodes.tenure.over
    assert costs.observed == [(3, 8), (0, 8)]


def test_steps_that_do_not_pack_are_not_beside():
    costs = Fixed(8)
    scheduler = Scheduler(LIMITS, lambda _: costs)
    for task in (Fake("packs"), Fake("does not", packs=False), Fake("prefills", 16)):
        scheduler.add(task, 0.0)
    iteration(scheduler)
    assert costs.asked == [(1, True)]


def test_a_sessions_own_next_prompt_has_the_whole_budget():
    """It has just decoded, and is expected back by nothing else."""
    costs = Fixed(8)
    scheduler, tenure = Scheduler(LIMITS, lambda _: costs), Tenure()
    scheduler.add(Fake("a", tenure=tenure), 0.0)
    iteration(scheduler)
    scheduler.add(Fake("a", 16, tenure=tenure), 0.0)
    iteration(scheduler)
    assert costs.asked == [(0, False)]


def test_budgets_are_asked_for_only_where_prefill_waits():
    """Else iterations of steps use up the pauses between tries, and the ones that run bare."""
    costs = Fixed(8)
    scheduler = Scheduler(LIMITS, lambda _: costs)
    for _ in range(3):
        scheduler.add(Fake("a"), 0.0)
        scheduler.add(Fake("b"), 0.0)
        iteration(scheduler)
    assert costs.asked == []


def test_failed_tasks_and_probes_teach_no_costs():
    costs = Fixed(8)
    scheduler = Scheduler(LIMITS, lambda _: costs)
    scheduler.add(fails := Fake("fails"), 0.0)
    finish(scheduler, scheduler.form(0.0), failed=[fails])
    scheduler.add(Fake("", packs=False, cost=None, tenure=None), 0.0)
    iteration(scheduler)
    assert costs.observed == []


def test_spans_of_other_sizes_have_their_own_costs():
    made: list[Fixed] = []
    scheduler = Scheduler(LIMITS, lambda _: made.append(Fixed(8)) or made[-1])
    for n_blocks in (1, 12):
        scheduler.add(Fake("a", 8, packs=False, cost=n_blocks), 0.0)
        iteration(scheduler)
    assert [costs.observed for costs in made] == [[(0, 8)], [(0, 8)]]
    assert [costs.asked for costs in made] == [[(0, False)], [(0, False)]]


def test_a_piece_beyond_its_budget_is_repaid_while_sessions_decode():
    """64 tokens at 4 an iteration are one in sixteen; steps go on meanwhile."""
    scheduler, ran = granting(4), list[list[str]]()
    scheduler.add(wide := Fake("wide", rows=64), 0.0)
    scheduler.add(Fake("prefills", 400), 0.0)
    for _ in range(100):
        scheduler.add(Fake("decodes"), 0.0)
        ran.append([task.owner for task, _ in iteration(scheduler)])
        if wide.done:
            scheduler.add(wide := Fake("wide", rows=64, tenure=wide.tenure), 0.0)
    assert all("decodes" in names for names in ran)
    assert 4 <= sum("wide" in names for names in ran) <= 7
    assert max(map(len, ran)) == 2


def test_debts_are_bounded():
    scheduler = granting(4)
    scheduler.add(Fake("wide", rows=100_000), 0.0)
    scheduler.add(Fake("prefills", 400), 0.0)
    until_next = 0
    for number in range(1000):
        scheduler.add(Fake("decodes"), 0.0)
        if len(iteration(scheduler)) > 1 and number:
            break
        until_next = number
    assert until_next * 4 in range(LIMITS.batch.debt_tokens_max - 8, LIMITS.batch.debt_tokens_max + 8)


def test_nothing_is_owed_once_no_session_decodes():
    scheduler = granting(4)
    for task in (Fake("wide", rows=400), Fake("decodes", tenure=(decoding := Tenure()))):
        scheduler.add(task, 0.0)
    assert len(iteration(scheduler)) == 2
    decoding.over = True
    scheduler.add(prompt := Fake("prefills", 400), 0.0)
    assert iteration(scheduler) == [(prompt, 4)]


@pytest.mark.parametrize("n_wide", [1, 3])
@pytest.mark.parametrize("budget", [4, 64, 300])
def test_peers_get_the_same_prefill_whatever_their_rows(budget: int, n_wide: int):
    """A position of many rows takes the turns of many iterations."""
    scheduler, had = granting(budget), Counter[str]()
    scheduler.add(Fake("narrow", 1 << 30), 0.0)
    wide = [Fake(f"wide {number}", rows=256, done=1) for number in range(n_wide)]
    for _ in range(8000 // budget + 1000):
        scheduler.add(Fake("decodes"), 0.0)
        for number, task in enumerate(wide):
            if task.done:
                wide[number] = Fake(task.owner, rows=256, tenure=task.tenure)
                scheduler.add(wide[number], 0.0)
        for task, tokens in iteration(scheduler):
            had[task.owner] += tokens * task.rows
    assert had["narrow"] >= 0.75 * max(had[task.owner] for task in wide)
    assert min(had[task.owner] for task in wide) >= 0.5 * had["narrow"]


def test_an_ended_session_is_not_kept_in_memory():
    """Its cache is large."""
    scheduler = Scheduler()
    tenures = [Tenure(), Tenure()]
    for tenure in tenures:
        scheduler.add(Fake("a", tenure=tenure), 0.0)
    iteration(scheduler)
    scheduler.add(Fake("a", tenure=tenures[0]), 0.001)
    iteration(scheduler, now=0.002)
    alive = [weakref.ref(tenure) for tenure in tenures]
    del tenures, tenure
    gc.collect()
    assert [each() for each in alive] == [None, None]
