"""Receipts of servers: both ends of an edge sign the same digest, and the owner's own tally is the rest of it."""

import pytest

from swarm.activations import Activations
from swarm.protocol.attest import Attest, Attested
from swarm.protocol.messages import Close, Open, Reroute, Rerouted
from swarm.protocol.receipts import Receipt, ReceiptLimits, Statement, Tally, as_received
from swarm.protocol.tensors import Coding
from tests.server.sites import (
    FIRST,
    SECOND,
    Loaded,
    Peer,
    Site,
    activations,
    bounded,
    code,
    opened,
    opened_ring,
    rebuild,
    rebuilt,
    serving,
    step,
)


async def answer(owner: Peer, site: Site, request: Open, epoch: int = 0) -> Attested:
    got = await owner.ask(site, Attest(session=request.session, epoch=epoch))
    assert isinstance(got, Attested), got
    return got


async def signed(owner: Peer, site: Site, request: Open, epoch: int = 0) -> Statement:
    got = await answer(owner, site, request, epoch)
    assert got.statement is not None, got.why
    assert got.signature is not None
    statement = Receipt.read(got.statement, got.signature).statement
    assert (statement.peer_id, statement.session) == (site.peer, request.session)
    return statement


@pytest.mark.parametrize("coding", [None, "int8"])
async def test_hops_and_their_owner_have_the_same_digests(loaded: Loaded, owner: Peer, coding: Coding | None):
    async with serving(loaded, FIRST, coding=coding) as first, serving(loaded, SECOND, coding=coding) as second:
        numeric_class = "float32" if coding is None else "float32++int8"
        request = await opened_ring(owner, first, second, receipt=True, numeric_class=numeric_class, rollback_max=2)
        channel, tally, outputs = await owner.to(first), Tally(coding), Tally(coding)
        for number, (keep, tokens, want) in enumerate(((0, 6, 6), (6, 1, 1), (5, 1, 1), (6, 3, 1)), 1):
            message, given = step(request, number, activations(1, tokens, number), keep=keep, want=want, coding=coding)
            channel.send(message, given)
            told = await owner.output()
            received = Activations(as_received(given.hidden, coding))
            tally.add(keep, received, None)
            outputs.add(keep, received, told)
        before, behind = await signed(owner, first, request), await signed(owner, second, request)
        assert before.outputs == behind.inputs
        assert (before.length, before.told) == (9, 9)
        assert (behind.length, behind.told) == (9, 7)
        assert behind.outputs == outputs.outputs
        assert before.inputs == tally.inputs
        assert (before.start, before.stop, before.numeric_class) == (0, 3, numeric_class)


async def test_a_hop_that_takes_another_ones_place_has_its_inputs_and_told_nothing(loaded: Loaded, owner: Peer):
    async with serving(loaded, FIRST) as dead, serving(loaded, FIRST) as new:
        request = await opened(owner, dead, receipt=True)
        past = activations(1, 6)
        (await owner.to(dead)).send(*step(request, 1, past, want=6))
        await owner.output()
        before = await signed(owner, dead, request)
        again = await opened(owner, new, session=request.session, after_step=1, rebuild=True, receipt=True)
        for start in (0, 4):
            (await owner.to(new)).send(
                rebuild(again, start, 6, past[:, start : start + 4]), Activations(past[:, start : start + 4])
            )
        assert [await owner.next() for _ in range(2)] == [rebuilt(again, 4), rebuilt(again, 6)]
        after = await signed(owner, new, again)
        assert (after.inputs, after.length) == (before.inputs, before.length)
        assert (before.told, after.told) == (6, 0)


async def test_a_session_that_did_not_ask_is_not_noted_and_a_stranger_gets_nothing(
    first: Site, owner: Peer, stranger: Peer
):
    request = await opened(owner, first)
    (await owner.to(first)).send(*step(request, 1, activations(1, 2)))
    await owner.output()
    assert (await answer(owner, first, request)).why == "the session was opened without"
    assert first.session(request).history.tally is None
    assert code(await stranger.ask(first, Attest(session=request.session, epoch=0))) == "not_yours"


async def test_a_gather_and_a_session_that_is_too_long_leave_no_receipt(loaded: Loaded, owner: Peer):
    async with serving(loaded, FIRST, limits=bounded(receipts=ReceiptLimits(positions_max=4))) as site:
        request = await opened(owner, site, receipt=True, batch=2)
        assert (await answer(owner, site, request)).why == "the session has no positions"
        for number, fields, why in (
            (2, {"rows": (1, 0)}, "its rows were gathered"),
            (4, {}, "it has more than 4 positions"),
        ):
            first, more = step(request, number - 1, activations(2, 3)), step(request, number, activations(2, 2), keep=3)
            (await owner.to(site)).send(*first)
            await owner.output()
            (await owner.to(site)).send(more[0].model_copy(update=fields), more[1])
            await owner.output()
            assert (await answer(owner, site, request)).why == why


async def test_a_past_that_is_to_come_anew_is_not_told(first: Site, owner: Peer):
    request = await opened(owner, first, receipt=True)
    (await owner.to(first)).send(*step(request, 1, activations(1, 3)))
    await owner.output()
    reset = Reroute(session=request.session, epoch=1, reset=True, after_step=1)
    assert isinstance(await owner.ask(first, reset), Rerouted)
    assert (await answer(owner, first, request, 1)).why == "the session has no positions"


async def test_a_tally_is_charged_and_lost_where_there_is_no_room(first: Site, owner: Peer):
    request, journals = await opened(owner, first, receipt=True), first.server.memory.journals
    (await owner.to(first)).send(*step(request, 1, activations(1, 6)))
    await owner.output()
    assert (await signed(owner, first, request)).length == 6
    assert journals.used == 6 * 64
    journals.capacity = 7 * 64
    (await owner.to(first)).send(*step(request, 2, activations(1, 3), keep=6))
    await owner.output()
    assert (await answer(owner, first, request)).why == "there was no room for it"
    assert journals.used == 0
    journals.capacity = 1 << 20
    (await owner.to(first)).send(*step(request, 3, activations(1, 1)))
    await owner.output()
    assert (await signed(owner, first, request)).length == 1
    assert journals.used > 0
    (await owner.to(first)).send(Close(session=request.session))
    await owner.settled(first)
    assert journals.used == 0
