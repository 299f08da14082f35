"""What an owner allows its hops' neighbours, field by field."""

import asyncio
from dataclasses import replace

import pytest

from swarm.activations import Activations
from swarm.protocol.base import Message
from swarm.protocol.messages import Failed, Open, Reroute, Rerouted
from swarm.server.session import HostedSession
from tests.server.sites import Peer, Site, activations, code, open_for, opened, rebuild, rebuilt, step

OF_THE_GRANT = {"session", "epoch", "previous", "next_record", "relay", "lifetime_s", "tokens_max"}


OF_THE_SESSION = {"root", "numeric_class", "start", "stop", "positions_max", "rollback_max", "batch", "positions_soon"}


OF_THE_PAST = {"after_step", "rebuild", "reset"}


def test_every_field_that_opens_or_reroutes_is_one_that_is_tested_here():
    tested = OF_THE_GRANT | OF_THE_SESSION | OF_THE_PAST - {"reset"}
    # the tenant decides turns alone; test_prefixes and test_receipts have the others
    assert set(Open.model_fields) - {"kind"} == tested | {"tenant", "marks", "receipt"}
    assert set(Reroute.model_fields) - {"kind"} == OF_THE_GRANT | OF_THE_PAST - {"rebuild"}


UNDER_ANOTHER = {
    "session": ({"session": f"{7:032x}"}, "failed"),
    "epoch, an earlier one": ({"epoch": 4}, "not_yours"),
    "epoch, a later one": ({"epoch": 6}, "not_yours"),
}


@pytest.mark.parametrize("by", [Open, Reroute])
@pytest.mark.parametrize("what", UNDER_ANOTHER)
async def test_a_frame_under_another_grant_is_refused(
    first: Site, owner: Peer, stranger: Peer, what: str, by: type[Message]
):
    request = await granted(owner, first, by, previous=stranger.peer)
    changes, expected = UNDER_ANOTHER[what]
    message, tensors = step(request, 1, activations(1, 2), **changes)
    answer = await stranger.ask(first, message, tensors)
    assert (answer.kind if isinstance(answer, Failed) else code(answer)) == expected
    assert first.computed == 0
    assert first.server.pool.used == 0


@pytest.mark.parametrize("by", [Open, Reroute])
async def test_a_grant_to_another_peer_or_for_less_is_refused_to_this_one(
    first: Site, owner: Peer, stranger: Peer, by: type[Message]
):
    for grant, expected in (
        ({"previous": first.peer}, "not_yours"),
        ({"previous": None}, "not_yours"),
        ({"previous": stranger.peer, "tokens_max": 1}, "grant_over"),
        ({"previous": stranger.peer, "lifetime_s": 1}, "grant_over"),
    ):
        request = await granted(owner, first, by, **grant)
        if "lifetime_s" in grant:
            end_grant(first.session(request), within_s=1.0)
        (await stranger.to(first)).send(*step(request, 1, activations(1, 2)))
        hears = stranger if expected == "not_yours" else owner
        assert code(await hears.next()) == expected
    assert first.computed == 0


def end_grant(session: HostedSession, within_s: float) -> None:
    """Let a grant that ends within so many seconds be over."""
    grant, now = session.seat.grant, asyncio.get_running_loop().time()
    assert 0 < grant.ends_at - now <= within_s
    session.seat = replace(session.seat, grant=replace(grant, ends_at=now - 0.01))


async def granted(owner: Peer, site: Site, by: type[Message], **grant: object) -> Open:
    """Let a neighbour in by either message, in epoch 5."""
    if by is Open:
        return await opened(owner, site, epoch=5, **grant)
    request = await opened(owner, site, epoch=4)
    again = Reroute.model_validate({"session": request.session, "epoch": 5, **grant})
    assert isinstance(await owner.ask(site, again), Rerouted)
    return request.model_copy(update={"epoch": 5})


async def test_a_grant_for_another_span_or_peer_is_refused(first: Site, second: Site, owner: Peer, stranger: Peer):
    for start, stop in ((0, 4), (3, 6), (2, 2)):
        assert code(await owner.ask(first, open_for(first, start=start, stop=stop))) == "not_served"
    request = await opened(owner, first, next_record=second.record())  # outputs of first, which has blocks 0:3
    await opened(owner, second, session=request.session, previous=stranger.peer)  # from somebody else, it says
    (await owner.to(first)).send(*step(request, 1, activations(1, 2)))
    refused = await owner.next()  # by second, through first
    assert isinstance(refused, Failed)
    assert "another peer" in refused.why
    assert second.computed == 0
    assert code(await owner.ask(second, *step(request, 1, activations(1, 2)))) == "not_yours"
    assert second.computed == 0


async def test_a_grant_ends_with_its_time_and_a_reroute_gives_another(first: Site, owner: Peer, stranger: Peer):
    request = await opened(owner, first, previous=stranger.peer, lifetime_s=60)
    (await stranger.to(first)).send(*step(request, 1, activations(1, 2)))
    await owner.output()
    end_grant(first.session(request), within_s=60.0)
    late, hidden = step(request, 2, activations(1, 1), keep=2)
    (await stranger.to(first)).send(late, hidden)
    assert code(await owner.next()) == "grant_over"
    assert first.computed == 1
    again = Reroute(session=request.session, epoch=1, previous=stranger.peer, lifetime_s=60)
    assert isinstance(await owner.ask(first, again), Rerouted)
    (await stranger.to(first)).send(late.model_copy(update={"epoch": 1}), hidden)
    await owner.output()


async def test_a_grant_ends_with_its_tokens_and_those_of_all_rows_count(first: Site, owner: Peer):
    request = await opened(owner, first, tokens_max=10)
    (await owner.to(first)).send(*step(request, 1, activations(3, 3)))
    await owner.output()
    assert code(await owner.ask(first, *step(request, 2, activations(3, 1), keep=3))) == "grant_over"
    assert first.server.handler.sessions[request.session].seat.grant.tokens == 1
    (await owner.to(first)).send(*step(request, 2, activations(1, 1), keep=3, rows=(0,)))
    await owner.output()
    assert code(await owner.ask(first, *step(request, 3, activations(1, 1), keep=4))) == "grant_over"
    assert first.computed == 2


async def test_a_past_that_is_rebuilt_is_part_of_the_grant(first: Site, owner: Peer):
    request = await opened(owner, first, after_step=1, rebuild=True, tokens_max=3)
    piece = activations(1, 4)
    assert code(await owner.ask(first, rebuild(request, 0, 4, piece), Activations(piece))) == "grant_over"
    assert first.server.pool.used == 0
    request = await opened(owner, first, after_step=1, rebuild=True, tokens_max=4)
    assert await owner.ask(first, rebuild(request, 0, 4, piece), Activations(piece)) == rebuilt(request, 4)
    assert first.session(request).seat.grant.tokens == 0
    assert code(await owner.ask(first, *step(request, 2, activations(1, 1), keep=4))) == "grant_over"


async def test_a_past_that_comes_after_its_grant_is_refused(first: Site, owner: Peer):
    request = await opened(owner, first, after_step=1, rebuild=True, lifetime_s=60)
    end_grant(first.session(request), within_s=60.0)
    piece = activations(1, 4)
    assert code(await owner.ask(first, rebuild(request, 0, 4, piece), Activations(piece))) == "grant_over"
    assert first.server.pool.used == 0
