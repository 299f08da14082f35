"""Which sessions a server opens, and with which next hops."""

import asyncio
import socket
import time
from base64 import b64encode

import pytest
import torch

from swarm.blocks import Blocks
from swarm.dht.records import sign_announcement
from swarm.identity import Identity
from swarm.model.span import Span, SpanLimits
from swarm.protocol.messages import Close, Failed, Inquiry, Opened, Reroute, Rerouted
from swarm.server.gateways import GatewayAllowance
from swarm.server.limits import AdmissionLimits, HandlerLimits, HostedLimits
from swarm.server.server import ServerLimits
from tests.server.sites import (
    FIRST,
    WITHIN_S,
    Loaded,
    Peer,
    Site,
    activations,
    code,
    open_for,
    opened,
    serving,
    step,
    until,
)


@pytest.mark.parametrize(
    "changes",
    [
        {"root": "ab" * 32},
        {"numeric_class": "bfloat16"},
        {"numeric_class": "float32+gptq"},
        {"numeric_class": "float32++int8"},
        {"start": 2, "stop": 4},
        {"start": 3, "stop": 6},
        {"start": 2, "stop": 1},
        {"start": 1, "stop": 1},
        {"start": 0, "stop": 4096},
    ],
    ids=str,
)
async def test_what_is_not_served_is_refused(first: Site, owner: Peer, changes: dict[str, object]):
    refused = await owner.ask(first, open_for(first).model_copy(update=changes))
    assert code(refused) == "not_served"
    assert first.idle


async def test_a_part_of_the_span_is_served(loaded: Loaded, first: Site, owner: Peer):
    request = await opened(owner, first, start=1, stop=2)
    hidden = activations(1, 4)
    (await owner.to(first)).send(*step(request, 1, hidden, want=4))
    with torch.inference_mode():
        expected = loaded.spans[FIRST].part(Blocks(1, 2)).forward(hidden, cache=None)
    assert torch.equal(await owner.output(), expected)


async def test_what_strangers_open_is_not_remembered_for_ever(
    loaded: Loaded, first: Site, owner: Peer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(first.server.span.shared, "limits", SpanLimits(parts_max=2))
    requests = [await opened(owner, first, start=a, stop=b) for a, b in ((0, 1), (0, 2), (1, 2), (1, 3), (0, 3))]
    assert len(first.server.span.shared.parts) <= 2
    assert first.server.span.part(FIRST) is first.server.span
    hidden = activations(1, 4)
    (await owner.to(first)).send(*step(requests[0], 1, hidden, want=4))
    with torch.inference_mode():
        expected = loaded.spans[FIRST].part(Blocks(0, 1)).forward(hidden, cache=None)
    assert torch.equal(await owner.output(), expected)


def records_that_do_not_hold(first: Site, second: Site) -> dict[str, str]:
    """Of the hop behind `first`."""
    good = second.record()
    past = time.time() - HostedLimits().next_record_late_s - 120
    return {
        "not base64": "#" + good,
        "a changed byte": good[:-8] + ("A" if good[-8] != "A" else "B") + good[-7:],
        "a changed signature": ("A" if good[0] != "A" else "B") + good[1:],
        "expired": second.record(issued=past, expires=past + 60),
        "from the future": second.record(issued=time.time() + 300, expires=time.time() + 330),
        "another network": second.record(network="other"),
        "another model": second.record(root="cd" * 32),
        "another tier": second.record(numeric_class="float32+q4_0"),
        "a class that claims to be a tier": second.record(numeric_class="full"),
        "not adjacent": second.record(blocks=(4, 6)),
        "behind": first.record(),
        "another protocol": second.record(protocol=2),
        "empty": "",
    }


async def test_a_next_record_that_does_not_hold_is_refused(first: Site, second: Site, owner: Peer):
    for what, record in records_that_do_not_hold(first, second).items():
        refused = await owner.ask(first, open_for(first, next_record=record))
        assert code(refused) == "bad_request", what
        assert "next hop" in refused.why, what
    assert first.idle
    for name in ("float32", "float32+int8", "bfloat16"):
        record = second.record(numeric_class=name)
        assert isinstance(await owner.ask(first, open_for(first, next_record=record)), Opened), name


async def test_nor_is_it_taken_when_it_comes_by_a_reroute(first: Site, second: Site, owner: Peer):
    request = await opened(owner, first, next_record=second.record())
    for what, record in records_that_do_not_hold(first, second).items():
        refused = await owner.ask(first, Reroute(session=request.session, epoch=1, next_record=record))
        assert code(refused) == "bad_request", what
    assert first.server.handler.sessions[request.session].seat.epoch == 0


async def test_a_route_outlives_the_records_it_was_planned_with(first: Site, second: Site, owner: Peer):
    past = time.time() - 3600
    old = second.record(issued=past, expires=past + 60)
    request = open_for(first, next_record=second.record())
    assert isinstance(await owner.ask(first, request), Opened)
    assert isinstance(
        await owner.ask(first, Reroute(session=request.session, epoch=request.epoch + 1, next_record=old)), Rerouted
    )


async def test_a_next_record_signed_by_somebody_else_is_refused(first: Site, second: Site, owner: Peer):
    forger = Identity.generate()
    honest = second.server.announcement("online")
    now = time.time()
    forged = honest.model_copy(update={"issued": now, "expires": now + 60, "public_key": forger.public_key.hex()})
    data = sign_announcement(forged, forger)
    pretended = data.replace(forger.public_key.hex().encode(), second.identity.public_key.hex().encode())
    refused = await owner.ask(first, open_for(first, next_record=b64encode(pretended).decode()))
    assert code(refused) == "bad_request"
    assert "signature" in refused.why


async def test_a_next_hop_that_does_not_answer_is_blamed(first: Site, second: Site, owner: Peer):
    record = second.record(addresses=("127.0.0.1:1",))
    request = open_for(first, next_record=record)
    failed = await owner.ask(first, request)
    assert isinstance(failed, Failed)
    assert failed.blame == "next"
    (await owner.to(first)).send(Close(session=request.session))
    await until(lambda: first.idle)


async def test_a_session_closed_during_a_dial_stays_over(first: Site, second: Site, owner: Peer):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        request = open_for(first, next_record=second.record(addresses=(f"{host}:{port}",)))
        (await owner.to(first)).send(request)
        (await owner.to(first)).send(Close(session=request.session))
        await owner.settled(first)
        (dialling,) = first.server.handler.links.openings
    silent.close()  # the dial fails now
    async with asyncio.timeout(WITHIN_S):
        await dialling
    assert owner.inbox.empty()
    assert first.idle


async def test_a_draining_server_serves_its_sessions_and_opens_none(first: Site, owner: Peer):
    request = await opened(owner, first)
    first.server.handler.admission.draining = True
    assert code(await owner.ask(first, open_for(first))) == "draining"
    (await owner.to(first)).send(*step(request, 1, activations(1, 2)))
    await owner.output()


async def test_a_peers_sessions_are_bounded_over_all_its_channels(first: Site, owner: Peer, stranger: Peer):
    again, limits = Peer(owner.me.identity), AdmissionLimits()
    for number in range(limits.sessions_max // (limits.sessions_share + 1)):
        request = open_for(first)
        assert isinstance(await (again if number % 2 else owner).ask(first, request), Opened)
    assert code(await owner.ask(first, open_for(first))) == "no_room"
    later = request.model_copy(update={"epoch": request.epoch + 1})
    assert isinstance(await owner.ask(first, later), Opened), "it takes the place of the one before it"
    assert code(await again.ask(first, open_for(first))) == "no_room"
    assert isinstance(await stranger.ask(first, open_for(first)), Opened)
    again.leave()


async def test_a_peers_sessions_leave_room_for_those_of_others(loaded: Loaded, owner: Peer, stranger: Peer):
    limits = ServerLimits(handler=HandlerLimits(admission=AdmissionLimits(sessions_max=64)))
    async with serving(loaded, FIRST, limits=limits) as first:
        for _ in range(3):
            await opened(owner, first)
        refused = await owner.ask(first, open_for(first))
        assert code(refused) == "no_room"
        assert refused.retry_after_ms > 0
        await opened(stranger, first)


async def test_gateway_has_the_sessions_that_the_operator_allows(loaded: Loaded, owner: Peer, stranger: Peer):
    allowance = {owner.me.identity.peer_id: GatewayAllowance(sessions=5, openings_per_s=8.0, steps_per_s=2000.0)}
    limits = ServerLimits(handler=HandlerLimits(admission=AdmissionLimits(sessions_max=32), gateways=allowance))
    async with serving(loaded, FIRST, limits=limits) as first:
        for _ in range(5):
            await opened(owner, first)
        assert code(await owner.ask(first, open_for(first))) == "no_room"
        await opened(stranger, first)
        assert code(await stranger.ask(first, open_for(first))) == "no_room"


async def test_a_gateways_messages_are_read_at_once(loaded: Loaded, owner: Peer, stranger: Peer):
    """Those of a repair move no session forward: of strangers only so many are read in a second."""
    allowance = {owner.me.identity.peer_id: GatewayAllowance(sessions=60, openings_per_s=60.0, steps_per_s=2000.0)}
    async with serving(loaded, FIRST, limits=ServerLimits(handler=HandlerLimits(gateways=allowance))) as first:
        first.server.listener.flow.idle.owe(asyncio.get_running_loop().time(), 1e9)  # a crowd has used what is shared
        many = 2 * int(first.server.listener.flow.limits.reading.idle_burst)
        for asker in (stranger, owner):
            request = await opened(asker, first)
            for _ in range(many):
                (await asker.to(first)).send(Inquiry(session=request.session, epoch=request.epoch))
        await until(lambda: owner.inbox.qsize() == many)
        assert stranger.inbox.qsize() < many


async def test_a_session_that_will_soon_lack_room_is_not_opened(first: Site, owner: Peer, stranger: Peer):
    """Else several take their room piece by piece, until each waits for what another one holds."""
    room = first.server.pool.most
    request = await opened(owner, first, positions_soon=room - 8)
    refused = await owner.ask(first, open_for(first, positions_soon=room - 8))
    assert (code(refused), refused.retry_after_ms > 0) == ("no_room", True)
    await opened(owner, first, positions_soon=8)
    other = await opened(stranger, first, positions_soon=room)  # nothing is set aside for anybody
    (await owner.to(first)).send(*step(request, 1, activations(1, 4)))
    await owner.output()
    assert code(await stranger.ask(first, open_for(first, positions_soon=room))) == "no_room"
    (await stranger.to(first)).send(Close(session=other.session))
    await stranger.settled(first)
    assert code(await stranger.ask(first, open_for(first, positions_soon=room))) == "no_room"  # 4 are somebody else's
    await opened(stranger, first, positions_soon=4)


async def test_a_session_opened_anew_needs_no_second_room(first: Site, owner: Peer, stranger: Peer):
    """As after a connection that this side does not know to be dead."""
    await opened(stranger, first)
    (await stranger.to(first)).send(*step(await opened(stranger, first), 1, activations(1, 1)))
    await stranger.output()
    tokens = first.server.pool.free(owner.peer)
    request = await opened(owner, first, positions_soon=tokens, positions_max=tokens)
    (await owner.to(first)).send(*step(request, 1, activations(1, tokens)))
    await owner.output()
    assert isinstance(await owner.ask(first, request.model_copy(update={"epoch": 1})), Opened)


async def test_an_opened_session_has_no_cache_before_its_first_step(
    first: Site, owner: Peer, monkeypatch: pytest.MonkeyPatch
):
    made, new_cache = [], Span.new_cache
    monkeypatch.setattr(Span, "new_cache", lambda *arguments: made.append(new_cache(*arguments)) or made[-1])
    request = await opened(owner, first)
    await owner.settled(first)
    assert made == []
    (await owner.to(first)).send(*step(request, 1, activations(1, 3)))
    await owner.output()
    assert [cache.length for cache in made] == [3]
