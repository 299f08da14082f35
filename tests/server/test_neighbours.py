"""The channels beside a session: who reads, who relays, who is heard."""

import asyncio
from types import SimpleNamespace

import pytest

from swarm.net.channel import Channel
from swarm.protocol.messages import Close, Reroute
from tests.server.sites import Peer, Site, activations, code, open_for, opened, opened_ring, step, until


async def test_a_previous_hop_that_is_not_read_is_not_quiet(first: Site, owner: Peer, stranger: Peer):
    """Else bytes that wait to be read are taken for lost, and the edge for blocked."""
    request = await opened(owner, first, previous=stranger.peer)
    session, now = first.session(request), asyncio.get_running_loop().time()
    for is_paused, quiet_ms in ((False, 60_000), (True, 0)):
        session.peers.source = SimpleNamespace(heard_at=now - 60, is_paused=is_paused)
        assert session.progress(0, now).quiet_ms == quiet_ms


async def test_an_owner_that_does_not_read_gets_no_answer_again(
    first: Site, owner: Peer, monkeypatch: pytest.MonkeyPatch
):
    """A few bytes would make the server write, and hold, as many megabytes as the owner likes."""
    request = await opened(owner, first)
    message = step(request, 1, activations(1, 4))
    (await owner.to(first)).send(*message)
    await owner.output()
    first.tighten(unread_bytes_max=-1)
    assert code(await owner.ask(first, *message)) == "busy"


async def test_an_owner_that_does_not_read_gets_no_outputs(first: Site, owner: Peer):
    request = await opened(owner, first)
    first.tighten(unread_bytes_max=-1)
    refused = await owner.ask(first, *step(request, 1, activations(1, 2)))
    assert code(refused) == "busy"
    assert "not read" in refused.why
    assert first.computed == 0


async def test_a_next_hop_that_does_not_read_gets_no_more(
    first: Site, second: Site, owner: Peer, monkeypatch: pytest.MonkeyPatch
):
    request = await opened_ring(owner, first, second)
    message = step(request, 1, activations(1, 4))
    (await owner.to(first)).send(*message)
    await owner.output()
    first.tighten(next_unread_bytes_max=-1)
    for each in (message, step(request, 2, activations(1, 1), keep=4)):
        assert code(await owner.ask(first, *each)) == "busy"


async def test_a_relaying_owners_channel_is_not_released(first: Site, owner: Peer, monkeypatch: pytest.MonkeyPatch):
    released: list[Channel] = []
    monkeypatch.setattr(first.server.handler.links.dialer, "release", released.append)
    request = await opened(owner, first, relay=True)
    (await owner.to(first)).send(Close(session=request.session))
    await until(lambda: first.idle)
    assert released == []


async def test_a_request_with_both_next_record_and_relay_is_refused(first: Site, second: Site, owner: Peer):
    request = await opened(owner, first)
    both = {"next_record": second.record(), "relay": True}
    assert code(await owner.ask(first, open_for(first, **both))) == "bad_request"
    assert code(await owner.ask(first, Reroute(session=request.session, epoch=1, **both))) == "bad_request"
