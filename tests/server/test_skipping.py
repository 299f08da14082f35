"""Steps that wait at a server while a later one takes them back: not computed, counted, and answered empty."""

import asyncio

import torch

from swarm.protocol.messages import Output, Replay, Reroute, Rerouted, Step
from tests.server.sites import (
    FIRST,
    SECOND,
    TOLERANCE,
    Loaded,
    Peer,
    Site,
    activations,
    held_up,
    local,
    opened,
    opened_ring,
    serving,
    span_output,
    step,
    until,
)

PROMPT, WRONG, WORSE, RIGHT = (activations(1, tokens, seed=seed) for seed, tokens in enumerate((4, 2, 3, 1)))


async def answers(owner: Peer, count: int) -> list[torch.Tensor | None]:
    """Return the outputs of the next steps, in order; None for one that was skipped."""
    got = []
    for _ in range(count):
        async with asyncio.timeout(10):
            message, output = await owner.inbox.get()
        assert isinstance(message, Output), message
        got.append(None if output is None else output.hidden.clone())
    return got


def guesses(request, **last) -> list:
    """Two windows of wrong guesses, and the step that takes both back."""
    return [
        step(request, 2, WRONG, keep=4, want=2),
        step(request, 3, WORSE, keep=6, want=3),
        step(request, 4, RIGHT, **({"keep": 4, "skips": True} | last)),
    ]


async def prompted(owner: Peer, site: Site, request) -> None:
    (await owner.to(site)).send(*step(request, 1, PROMPT))
    await answers(owner, 1)


async def send_held(owner: Peer, site: Site, steps: list, held: Site | None = None) -> None:
    """Send steps to a server while it, or another one, does not compute."""
    release = held_up(held or site)
    channel = await owner.to(site)
    for each in steps:
        channel.send(*each)
    await owner.settled(site)
    if held is not None:
        session = held.server.handler.sessions[steps[0][0].session]
        await until(lambda: session.inbox.under_way == len(steps))
    release.set()


async def test_queued_steps_that_a_later_one_takes_back_are_answered_empty(loaded: Loaded, first: Site, owner: Peer):
    request = await opened(owner, first, rollback_max=16)
    await prompted(owner, first, request)
    await send_held(owner, first, guesses(request))
    *skipped, right = await answers(owner, 3)
    assert skipped == [None, None]
    expected = span_output(loaded, FIRST, torch.cat([PROMPT, RIGHT], dim=1))[:, -1:]
    assert (right - expected).abs().max() < TOLERANCE
    assert first.session(request).tenure.past.cache.length == 5


async def test_a_skipped_step_that_comes_again_is_answered_empty_again(first: Site, owner: Peer):
    request = await opened(owner, first, rollback_max=16)
    await prompted(owner, first, request)
    steps = guesses(request)
    await send_held(owner, first, steps)
    await answers(owner, 3)
    (await owner.to(first)).send(*steps[1])
    assert await answers(owner, 1) == [None]


async def test_steps_are_computed_unless_the_later_one_allows_to_skip_them(first: Site, owner: Peer):
    """An owner may want both: a branch of the text, and another one in its place."""
    request = await opened(owner, first, rollback_max=16)
    await prompted(owner, first, request)
    await send_held(owner, first, guesses(request, skips=None))
    assert [output.shape[1] for output in await answers(owner, 3)] == [2, 3, 1]


async def test_a_step_of_which_some_positions_stay_is_computed(loaded: Loaded, first: Site, owner: Peer):
    request = await opened(owner, first, rollback_max=16)
    await prompted(owner, first, request)
    await send_held(owner, first, guesses(request, keep=5))
    half, skipped, right = await answers(owner, 3)
    assert half.shape[1] == 2
    assert skipped is None
    expected = span_output(loaded, FIRST, torch.cat([PROMPT, WRONG[:, :1], RIGHT], dim=1))[:, -1:]
    assert (right - expected).abs().max() < TOLERANCE


async def test_a_step_that_gathers_rows_is_computed_and_all_before_it(loaded: Loaded, first: Site, owner: Peer):
    request = await opened(owner, first, rollback_max=16)
    await prompted(owner, first, request)
    steps = guesses(request)
    steps[1] = step(request, 3, WORSE, keep=6, want=3, rows=(0,))
    await send_held(owner, first, steps)
    assert [output.shape[1] for output in await answers(owner, 3)] == [2, 3, 1]


async def test_an_empty_answer_goes_on_along_the_route(loaded: Loaded, first: Site, second: Site, owner: Peer):
    request = await opened_ring(owner, first, second, rollback_max=16)
    await prompted(owner, first, request)
    await send_held(owner, first, guesses(request))
    *skipped, right = await answers(owner, 3)
    assert skipped == [None, None]
    assert (right - local(loaded, torch.cat([PROMPT, RIGHT], dim=1))[:, -1:]).abs().max() < TOLERANCE
    for site in (first, second):
        session = site.session(request)
        assert (session.length, session.tenure.past.cache.length, session.inbox.applied) == (5, 5, 4)


async def test_a_step_that_one_hop_has_computed_is_skipped_by_the_next(
    loaded: Loaded, first: Site, second: Site, owner: Peer
):
    request = await opened_ring(owner, first, second, rollback_max=16)
    await prompted(owner, first, request)
    await send_held(owner, first, guesses(request), held=second)
    *skipped, right = await answers(owner, 3)
    assert skipped == [None, None]
    assert (right - local(loaded, torch.cat([PROMPT, RIGHT], dim=1))[:, -1:]).abs().max() < TOLERANCE


async def test_a_step_that_continues_a_skipped_one_is_not_computed(loaded: Loaded, second: Site, owner: Peer):
    """The hop before was replaced meanwhile, and its successor has computed the rest."""
    request = await opened(owner, second, rollback_max=16)
    await prompted(owner, second, request)
    first_window, second_window, right = guesses(request)
    empty = Step.model_validate(first_window[0].model_dump() | {"hidden": None, "rows": None})
    channel = await owner.to(second)
    channel.send(empty)
    channel.send(*second_window)
    channel.send(*right)
    *skipped, output = await answers(owner, 3)
    assert skipped == [None, None]
    expected = span_output(loaded, SECOND, torch.cat([PROMPT, RIGHT], dim=1))[:, -1:]
    assert (output - expected).abs().max() < TOLERANCE


async def test_a_replay_brings_no_positions_of_a_step_that_was_skipped(
    loaded: Loaded, first: Site, second: Site, owner: Peer
):
    """The first hop had computed it. A new second one is to be where the client says that all hops were."""
    request = await opened_ring(owner, first, second, rollback_max=16)
    await prompted(owner, first, request)
    await send_held(owner, first, guesses(request)[:2])
    await answers(owner, 2)
    async with serving(loaded, SECOND) as third:
        anew = {"session": request.session, "epoch": 1, "previous": first.peer, "after_step": 2, "rebuild": True}
        await opened(owner, third, **anew, rollback_max=16)
        reroute = Reroute(session=request.session, epoch=1, next_record=third.record(), after_step=2)
        assert isinstance(await owner.ask(first, reroute), Rerouted)
        replay = Replay(session=request.session, epoch=1, step=2, hops=1, stop=4)
        rebuilt = await owner.ask(first, replay)
        assert rebuilt.stop == 4
        later = step(request, 3, WORSE, keep=6, want=3, epoch=1), step(request, 4, RIGHT, keep=4, epoch=1)
        for each in later:
            (await owner.to(first)).send(*each)
        skipped, right = await answers(owner, 2)
        assert skipped is None
        assert (right - local(loaded, torch.cat([PROMPT, RIGHT], dim=1))[:, -1:]).abs().max() < TOLERANCE
