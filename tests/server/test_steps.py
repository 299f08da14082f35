"""Steps that a server computes, answers again or refuses."""

import asyncio

import pytest
import torch
from torch import Tensor

from swarm.activations import Activations, is_finite
from swarm.model.span import Span
from swarm.protocol.messages import (
    ROWS_MAX,
    Failed,
    Inquiry,
    Output,
    Progress,
    Rebuilt,
    Refused,
    Reroute,
    Rerouted,
    Step,
)
from tests.server.sites import (
    FIRST,
    HIDDEN,
    TOKEN_BYTES,
    TOLERANCE,
    WINDOW,
    Loaded,
    Peer,
    Site,
    activations,
    code,
    held_up,
    opened,
    opened_ring,
    rebuild,
    serving,
    span_output,
    step,
    until,
)

BAD_STEPS: dict[str, tuple[dict[str, object], dict[str, Tensor]]] = {
    "activations of another width": ({}, {"hidden": torch.zeros(2, 3, HIDDEN + 1)}),
    "activations of whole numbers": ({}, {"hidden": torch.zeros(2, 3, HIDDEN, dtype=torch.int64)}),
    "activations of rank 2": ({}, {"hidden": torch.zeros(3, HIDDEN)}),
    "other rows than before": ({}, {"hidden": torch.zeros(3, 3, HIDDEN)}),
    "position ids of another length": ({}, {"positions": torch.zeros(2, 4, dtype=torch.int64)}),
    "position ids of another batch": ({}, {"positions": torch.zeros(3, 3, dtype=torch.int64)}),
    "position ids of another dtype": ({}, {"positions": torch.zeros(2, 3)}),
    "negative position ids": ({}, {"positions": torch.full((2, 3), -1, dtype=torch.int64)}),
    "position ids beyond the model's end": ({}, {"positions": torch.full((2, 3), 256, dtype=torch.int64)}),
    "a mask of another shape": ({}, {"mask": torch.ones(2, 4, dtype=torch.uint8)}),
    "a mask of another dtype": ({}, {"mask": torch.ones(2, 3, dtype=torch.int64)}),
    "too few rows gathered": ({"rows": (0,)}, {}),
    "rows that do not exist": ({"rows": (0, 2)}, {}),
    "no rows gathered": ({"rows": ()}, {}),
    "a rollback beyond what was agreed": ({"keep": 3}, {}),
    "more wanted than sent": ({"want": 4}, {}),
    "longer than the session may get": ({}, {"hidden": torch.zeros(2, 60, HIDDEN)}),
    "a step out of order": ({"step": 3}, {}),
    "no time left": ({"budget_ms": 0}, {}),
}


CODES = {
    "activations of another width": "bad_activations",
    "activations of whole numbers": "bad_activations",
    "activations of rank 2": "bad_activations",
    "a step out of order": "out_of_order",
    "no time left": "too_late",
}


@pytest.mark.parametrize("what", BAD_STEPS)
async def test_a_malformed_step_is_refused_and_the_session_is_intact(
    loaded: Loaded, first: Site, owner: Peer, what: str
):
    request = await opened(owner, first, positions_max=50, rollback_max=2)
    before, after = activations(2, 6, seed=1), activations(2, 3, seed=2)
    (await owner.to(first)).send(*step(request, 1, before))
    await owner.output()
    used = first.server.pool.used

    changes, tensors = BAD_STEPS[what]
    bad = step(request, 2, **({"hidden": after} | tensors), **({"keep": 6, "want": 1} | changes))
    refused = await owner.ask(first, *bad)
    assert code(refused) == CODES.get(what, "bad_request")
    assert first.server.pool.used == used

    (await owner.to(first)).send(*step(request, 2, after, keep=6, want=3))
    expected = span_output(loaded, FIRST, torch.cat([before, after], dim=1))[:, -3:]
    assert (await owner.output() - expected).abs().max() < TOLERANCE
    assert first.computed == 2


async def test_long_steps_are_bounded_in_bytes_single_tokens_in_rows(first: Site, owner: Peer):
    request = await opened(owner, first)
    message, hidden = step(request, 1, activations(1024, 17))
    assert code(await owner.ask(first, message, hidden)) == "bad_request"
    message, hidden = step(request, 1, activations(ROWS_MAX + 1, 1))
    assert code(await owner.ask(first, message, hidden)) == "bad_request"
    message, hidden = step(request, 1, activations(100, 1))
    (await owner.to(first)).send(message, hidden)
    assert (await owner.output()).shape[0] == 100


async def test_positions_end_where_the_model_does(loaded: Loaded, owner: Peer):
    limit = loaded.spans[FIRST].traits.positions_max
    assert limit is not None
    async with serving(loaded, FIRST, pool_tokens=4 * limit) as site:
        request = await opened(owner, site, positions_max=2 * limit)
        refused = await owner.ask(site, *step(request, 1, activations(1, limit + 1), want=1))
        assert code(refused) == "bad_request"
        assert f"{limit + 1} positions" in refused.why


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
async def test_activations_that_are_not_finite_are_refused_unapplied(loaded, first, owner, bad):
    request = await opened(owner, first)
    hidden = activations(1, 3)
    spoilt = hidden.clone()
    spoilt[0, 1, 7] = bad
    refused = await owner.ask(first, *step(request, 1, spoilt))
    assert code(refused) == "bad_activations"
    assert first.server.pool.used == 0
    (await owner.to(first)).send(*step(request, 1, hidden, want=3))
    assert torch.equal(await owner.output(), span_output(loaded, FIRST, hidden))


async def test_an_output_that_overflows_ends_the_session_and_goes_nowhere(first, second, owner, monkeypatch):
    request, forward = await opened_ring(owner, first, second), Span.forward
    monkeypatch.setattr(Span, "forward", lambda *arguments, **more: forward(*arguments, **more) * float("inf"))
    refused = await owner.ask(first, *step(request, 1, activations(1, 3)))
    assert isinstance(refused, Refused), refused
    assert refused.code == "bad_request"
    assert "blocks 0:3" in refused.why
    assert first.idle
    assert second.computed == 0
    assert owner.peer not in second.server.handler.accounts.peers or second.server.handler.accounts.of(
        owner.peer
    ).steps.is_full(asyncio.get_running_loop().time())


def test_a_sum_that_overflows_is_no_infinite_element():
    assert is_finite(torch.full((1, 2, 64), 3e38))
    assert is_finite(torch.full((4096,), 60000.0, dtype=torch.float16))
    assert is_finite(torch.empty(1, 0, 64))
    assert not is_finite(torch.tensor([float("inf"), float("-inf")]))


async def test_a_repeated_step_is_answered_again_and_not_computed_again(first: Site, second: Site, owner: Peer):
    request = await opened_ring(owner, first, second)
    sent = [step(request, 1, activations(1, 4), want=4), step(request, 2, activations(1, 1, seed=2), keep=4)]
    outputs = []
    for message in sent:
        (await owner.to(first)).send(*message)
        outputs.append(await owner.output())
    computed = (first.computed, second.computed)
    for message, output in [*zip(sent, outputs, strict=True)] * 2:
        (await owner.to(first)).send(*message)
        assert torch.equal(await owner.output(), output)
    assert (first.computed, second.computed) == computed == (2, 2)
    assert first.server.pool.used == 5


async def test_a_step_that_is_long_past_is_refused(first: Site, owner: Peer):
    request = await opened(owner, first)
    for number in range(1, WINDOW + 2):
        (await owner.to(first)).send(*step(request, number, activations(1, 1), keep=number - 1))
        await owner.output()
    refused = await owner.ask(first, *step(request, 1, activations(1, 1)))
    assert code(refused) == "out_of_order"


async def test_session_fails_if_a_repeated_steps_answer_was_evicted(first, owner):
    request = await opened(owner, first)
    first.server.memory.outputs.capacity = 3 * TOKEN_BYTES  # a peer alone gets eight ninths: two of them
    channel = await owner.to(first)
    steps = [step(request, number, activations(1, 1, seed=number), keep=number - 1) for number in (1, 2, 3)]
    outputs = []
    for each in steps:
        channel.send(*each)
        outputs.append(await owner.output())
    channel.send(*steps[1])
    assert torch.equal(await owner.output(), outputs[1])
    channel.send(*steps[0])
    failed = await owner.next()
    assert isinstance(failed, Failed)
    assert (failed.blame, failed.step) == ("self", 1)
    await until(lambda: first.idle)


async def test_session_fails_if_a_repeated_steps_journal_was_dropped(first, owner):
    request = await opened(owner, first, relay=True)
    channel, message = await owner.to(first), step(request, 1, activations(1, 2))
    for _ in range(2):
        channel.send(*message)
        assert isinstance(await owner.next(), Step)
    first.session(request).drop_journal()
    failed = await owner.ask(first, *message)
    assert isinstance(failed, Failed)
    assert (failed.blame, failed.step) == ("self", 1)
    assert first.computed == 1
    await until(lambda: first.idle)


async def test_more_steps_under_way_than_the_window_are_refused(first: Site, owner: Peer):
    request = await opened(owner, first)
    channel = await owner.to(first)
    release = held_up(first)
    for number in range(1, WINDOW + 2):
        channel.send(*step(request, number, activations(1, 1), keep=number - 1))
    assert code(await owner.next()) == "bad_request"
    release.set()
    for _ in range(WINDOW):
        await owner.output()


async def test_steps_that_a_reset_made_pointless_fill_no_window(loaded: Loaded, first: Site, owner: Peer):
    """A hop may be given a new past twice in a row, when others fail while the steps are sent again."""
    request = await opened(owner, first)
    channel = await owner.to(first)
    release = held_up(first)
    for number in range(1, WINDOW + 1):
        channel.send(*step(request, number, activations(1, 1), keep=number - 1))
    again = Reroute(session=request.session, epoch=1, reset=True, after_step=3)
    assert isinstance(await owner.ask(first, again), Rerouted)
    past = activations(1, 6)
    channel.send(rebuild(request, 0, 6, past).model_copy(update={"epoch": 1}), Activations(past))
    for number in range(4, 4 + WINDOW):
        message, hidden = step(request, number, activations(1, 1), keep=2 + number)
        channel.send(message.model_copy(update={"epoch": 1}), hidden)
    await owner.settled(first)
    progress = await owner.ask(first, Inquiry(session=request.session, epoch=1))
    assert isinstance(progress, Progress)
    assert (progress.applied, progress.length, progress.under_way) == (3, 6 + WINDOW, 1 + WINDOW)
    release.set()
    assert isinstance(await owner.next(), Rebuilt)
    expected = span_output(loaded, FIRST, torch.cat([past, *[activations(1, 1)] * WINDOW], dim=1))
    for position in range(6, 6 + WINDOW):
        assert (await owner.output() - expected[:, position : position + 1]).abs().max() < TOLERANCE
    progress = await owner.ask(first, Inquiry(session=request.session, epoch=1))
    assert isinstance(progress, Progress)
    assert (progress.applied, progress.under_way) == (3 + WINDOW, 0)


async def test_rollbacks_and_gathers_give_what_a_fresh_run_gives(loaded: Loaded, first: Site, owner: Peer):
    request = await opened(owner, first, rollback_max=4)
    start, more, tail = activations(2, 6, seed=1), activations(2, 2, seed=2), activations(3, 2, seed=3)
    (await owner.to(first)).send(*step(request, 1, start))
    await owner.output()
    (await owner.to(first)).send(*step(request, 2, more, keep=6))
    await owner.output()
    (await owner.to(first)).send(*step(request, 3, tail, keep=5, rows=(1, 0, 1), want=2))
    expected = span_output(loaded, FIRST, torch.cat([start[[1, 0, 1], :5], tail], dim=1))[:, -2:]
    assert (await owner.output() - expected).abs().max() < TOLERANCE
    assert first.server.pool.used == 3 * 7


async def test_a_session_may_always_begin_again(first: Site, owner: Peer):
    request = await opened(owner, first, rollback_max=2)
    (await owner.to(first)).send(*step(request, 1, activations(1, 6)))
    await owner.output()
    (await owner.to(first)).send(*step(request, 2, activations(1, 4, seed=1), keep=0, want=4))
    again = await owner.output()
    fresh = await opened(owner, first)
    (await owner.to(first)).send(*step(fresh, 1, activations(1, 4, seed=1), want=4))
    assert torch.equal(again, await owner.output())


async def test_a_step_behind_positions_that_are_not_there_is_answered_empty(loaded: Loaded, first: Site, owner: Peer):
    """After a repair it may continue a step that was skipped. Nothing of it is computed, and the session is intact."""
    request = await opened(owner, first, rollback_max=2)
    before, after = activations(1, 6), activations(1, 3, seed=2)
    (await owner.to(first)).send(*step(request, 1, before))
    await owner.output()
    empty = await owner.ask(first, *step(request, 2, after, keep=7))
    assert isinstance(empty, Output)
    assert (empty.step, empty.hidden) == (2, None)
    (await owner.to(first)).send(*step(request, 3, after, keep=6, want=3))
    expected = span_output(loaded, FIRST, torch.cat([before, after], dim=1))[:, -3:]
    assert (await owner.output() - expected).abs().max() < TOLERANCE
