"""A server keeps the beginning of a marked prompt for its owner alone, and drops it before it refuses anybody."""

import sys

import pytest
import torch

from swarm.protocol.marks import Marks
from swarm.protocol.messages import Close, Opened, Reroute, Rerouted
from swarm.server.limits import HandlerLimits, PrefixLimits
from swarm.server.server import ServerLimits
from tests.server.sites import (
    FIRST,
    SECOND,
    TOLERANCE,
    Peer,
    Site,
    activations,
    code,
    open_for,
    serving,
    span_output,
    step,
    until,
)

SIZE = 16
PROMPT = activations(1, 40)
MARKS = Marks(size=SIZE, tags=("a" * 32, "b" * 32))  # of 32 of its 40 positions


def held(answer) -> int:
    assert isinstance(answer, Opened), answer
    return answer.held or 0


def kept(site: Site) -> int:
    return site.server.handler.admission.prefixes.tokens


def reused(site: Site) -> int:
    return site.server.handler.admission.prefixes.counts.reused


async def opens(peer: Peer, site: Site, marks=MARKS, **changes):
    """Open a session with marks. Returns the request, and how many positions the server holds."""
    request = open_for(site, marks=marks, **changes)
    return request, held(await peer.ask(site, request))


async def computed(peer: Peer, site: Site, number, request, hidden, **changes) -> torch.Tensor:
    (await peer.to(site)).send(*step(request, number, hidden, want=hidden.shape[1], **changes))
    return await peer.output()


async def prompt_kept(peer: Peer, site: Site, **changes):
    """Compute the whole prompt in a session with marks, and close it."""
    request, _ = await opens(peer, site, **changes)
    await computed(peer, site, 1, request, PROMPT)
    await closed(peer, site, request)
    return request


async def closed(peer: Peer, site: Site, request) -> None:
    (await peer.to(site)).send(Close(session=request.session))
    await peer.settled(site)


@pytest.mark.parametrize("keep", [32, 16, 20, 0])
async def test_owners_next_session_goes_on_behind_what_is_kept(loaded, first: Site, owner: Peer, keep: int):
    """Also from before the end of it, as where another hop holds less."""
    await prompt_kept(owner, first)
    assert kept(first) == 32
    request, positions = await opens(owner, first)
    assert positions == 32
    output = await computed(owner, first, 1, request, PROMPT[:, keep:], keep=keep)
    expected = span_output(loaded, FIRST, PROMPT)[:, keep:]
    torch.testing.assert_close(output, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert reused(first) == keep


async def test_session_is_charged_for_what_it_begins_with(first: Site, owner: Peer):
    await prompt_kept(owner, first)
    assert first.server.pool.used == 0
    request, _ = await opens(owner, first)
    assert first.server.pool.used == 32
    await closed(owner, first, request)
    assert first.server.pool.used == 0


async def test_the_names_of_a_prompts_blocks_take_hardly_more_than_their_tags(first: Site, owner: Peer):
    """They are charged to nobody, and a peer has many sessions."""
    marks = Marks(size=16, tags=tuple(f"{number:032x}" for number in range(512)))
    request, _ = await opens(owner, first, marks, positions_max=16 * 512)
    keys = first.session(request).tenure.marked.keys
    assert len(keys) > 4
    assert sum(map(sys.getsizeof, keys)) <= 64 * len(keys)


async def test_another_peer_with_the_same_tags_finds_nothing(first: Site, owner: Peer, stranger: Peer):
    await prompt_kept(owner, first)
    assert (await opens(stranger, first))[1] == 0


async def test_blocks_are_found_from_the_beginning_and_for_their_own_span(first: Site, owner: Peer):
    await prompt_kept(owner, first)
    for marks, changes, expected in (
        (Marks(size=SIZE, tags=("a" * 32, "c" * 32)), {}, 16),
        (Marks(size=SIZE, tags=("b" * 32,)), {}, 0),
        (Marks(size=2 * SIZE, tags=("a" * 32,)), {}, 0),
        (MARKS, {"stop": FIRST.stop - 1}, 0),
        (MARKS, {"positions_max": 32}, 16),  # one position is left to compute
        (MARKS, {"batch": 2}, 0),
        (MARKS, {"rebuild": True}, 0),
        (MARKS, {"after_step": 3}, 0),
        (None, {}, 0),
    ):
        request, positions = await opens(owner, first, marks, **changes)
        assert positions == expected, (marks, changes)
        await closed(owner, first, request)


async def test_prompt_is_kept_however_it_is_cut_into_steps(loaded, first: Site, owner: Peer):
    request, _ = await opens(owner, first)
    for number, (start, stop) in enumerate(((0, 10), (10, 20), (20, 33)), 1):
        await computed(owner, first, number, request, PROMPT[:, start:stop], keep=start)
    await until(lambda: kept(first) == 32)
    request, positions = await opens(owner, first)
    output = await computed(owner, first, 1, request, PROMPT[:, positions:], keep=positions)
    expected = span_output(loaded, FIRST, PROMPT)[:, positions:]
    torch.testing.assert_close(output, expected, atol=TOLERANCE, rtol=TOLERANCE)


async def test_text_that_replaces_the_prompt_is_not_kept_as_the_prompt(first: Site, owner: Peer):
    request, _ = await opens(owner, first)
    await computed(owner, first, 1, request, PROMPT[:, :20])
    await computed(owner, first, 2, request, activations(1, 20, seed=2), keep=8)
    await until(lambda: kept(first) == 16)
    await owner.settled(first)
    assert (await opens(owner, first))[1] == 16


async def test_nothing_is_kept_after_a_reroute(first: Site, owner: Peer):
    """The tags name the hops of the opening; what comes later may come from others."""
    request, _ = await opens(owner, first)
    await computed(owner, first, 1, request, PROMPT[:, :20])
    await until(lambda: kept(first) == 16)
    assert isinstance(await owner.ask(first, Reroute(session=request.session, epoch=1)), Rerouted)
    again = request.model_copy(update={"epoch": 1})
    await computed(owner, first, 2, again, PROMPT[:, 20:], keep=20)
    assert kept(first) == 16


async def test_past_that_it_began_with_is_in_no_journal(first: Site, second: Site, owner: Peer):
    """A hop has no outputs of it to replay."""
    ring = {"next_record": second.record()}
    await opened_and_computed(owner, first, second, ring)
    request, positions = await opens(owner, first, **ring)
    assert positions == 32
    assert first.session(request).history.journal is None
    answer = await owner.ask(first, Reroute(session=request.session, epoch=1, next_record=second.record()))
    assert isinstance(answer, Rerouted)
    assert not answer.journal


async def test_session_that_begins_anew_after_all_has_a_journal(first: Site, second: Site, owner: Peer):
    ring = {"next_record": second.record()}
    await opened_and_computed(owner, first, second, ring)
    request, _ = await opens(owner, first, **ring)
    second_request = open_for(second, session=request.session, previous=first.peer)
    held(await owner.ask(second, second_request))
    await computed(owner, first, 1, request, PROMPT)
    assert first.session(request).history.journal is not None


async def opened_and_computed(owner: Peer, first: Site, second: Site, ring: dict) -> None:
    request, _ = await opens(owner, first, **ring)
    held(await owner.ask(second, open_for(second, session=request.session, previous=first.peer)))
    await computed(owner, first, 1, request, PROMPT)
    for site in (first, second):
        await closed(owner, site, request)


async def test_prefixes_give_way_before_a_session_is_refused(first: Site, owner: Peer, stranger: Peer):
    """A stranger gets as much of the pool as if nothing were kept."""
    await prompt_kept(owner, first)
    pool = first.server.pool
    request = open_for(first, positions_max=200)
    held(await stranger.ask(first, request))
    await computed(stranger, first, 1, request, activations(1, pool.most))
    assert pool.used == pool.most
    assert pool.used + kept(first) <= pool.capacity
    assert kept(first) < 32
    assert code(await stranger.ask(first, *step(request, 2, activations(1, 9), keep=pool.most))) == "no_room"


async def test_blocks_that_are_dropped_after_the_opening_are_still_the_sessions(loaded, first: Site, owner: Peer):
    await prompt_kept(owner, first)
    request, positions = await opens(owner, first)
    first.server.handler.admission.prefixes.sweep(now=1e12)
    assert kept(first) == 0
    output = await computed(owner, first, 1, request, PROMPT[:, positions:], keep=positions)
    expected = span_output(loaded, FIRST, PROMPT)[:, positions:]
    torch.testing.assert_close(output, expected, atol=TOLERANCE, rtol=TOLERANCE)


async def test_session_for_which_there_is_no_room_begins_without(loaded, owner: Peer, stranger: Peer):
    async with serving(loaded, FIRST, pool_tokens=128) as site:
        await prompt_kept(owner, site)
        other = open_for(site, positions_max=200)
        held(await owner.ask(site, other))
        await computed(owner, site, 1, other, activations(1, 90))
        assert kept(site) == 32
        request, positions = await opens(owner, site)
        assert (positions, site.session(request).length) == (0, 0)


async def test_share_of_the_pool_bounds_what_is_kept(loaded, owner: Peer):
    for share, expected in ((0.25, 16), (0.0, 0)):
        limits = ServerLimits(handler=HandlerLimits(prefixes=PrefixLimits(pool_share=share)))
        async with serving(loaded, SECOND, pool_tokens=100, limits=limits) as site:
            await prompt_kept(owner, site)
            assert kept(site) == expected
        owner.leave()


async def test_rollback_of_a_session_that_has_begun_is_bounded_as_ever(first: Site, owner: Peer):
    await prompt_kept(owner, first, rollback_max=2)
    request, positions = await opens(owner, first, rollback_max=2)
    await computed(owner, first, 1, request, PROMPT[:, 20:], keep=20)  # of the 32 that are held
    assert positions == 32
    assert code(await owner.ask(first, *step(request, 2, PROMPT[:, :4], keep=20))) == "bad_request"
    await computed(owner, first, 2, request, PROMPT[:, :4], keep=38)


async def test_reset_forgets_the_past_that_it_began_with(first: Site, owner: Peer):
    await prompt_kept(owner, first)
    request, _ = await opens(owner, first)
    session = first.session(request)
    assert isinstance(await owner.ask(first, Reroute(session=request.session, epoch=1, reset=True)), Rerouted)
    assert (session.length, session.tenure.held, session.tenure.marked) == (0, (), None)
