"""Sessions whose activations travel coded, at one server: opened where both ends know the coding, and kept to it."""

import pytest
import torch

from swarm.activations import Activations
from swarm.protocol.int8 import decode_int8, encode_int8
from swarm.protocol.messages import Open, Opened, Output, Reroute, Rerouted
from tests.server.sites import (
    FIRST,
    SECOND,
    Loaded,
    Peer,
    activations,
    code,
    open_for,
    opened,
    opened_ring,
    rebuild,
    serving,
    span_output,
    step,
)

CODED = "float32++int8"


def rounded(hidden):
    return decode_int8(memoryview(bytearray(encode_int8(hidden))), hidden.dtype, tuple(hidden.shape))


def coded_step(request: Open, number: int, hidden, **changes):
    return step(request, number, hidden, coding="int8", **changes)


async def test_a_coded_session_computes_from_the_codes_and_answers_in_codes(loaded: Loaded, owner: Peer):
    async with serving(loaded, FIRST, coding="int8") as first, serving(loaded, SECOND, coding="int8") as second:
        request = await opened_ring(owner, first, second, numeric_class=CODED)
        hidden = activations(1, 4)
        (await owner.to(first)).send(*coded_step(request, 1, hidden, want=4))
        between = rounded(span_output(loaded, FIRST, rounded(hidden)))
        assert torch.equal(await owner.output(), rounded(span_output(loaded, SECOND, between)))


async def test_a_repeated_step_is_answered_with_the_same_codes(loaded: Loaded, owner: Peer):
    async with serving(loaded, FIRST, coding="int8") as first:
        request = await opened(owner, first, numeric_class=CODED)
        sent = coded_step(request, 1, activations(1, 4), want=4)
        (await owner.to(first)).send(*sent)
        once = await owner.output()
        (await owner.to(first)).send(*sent)
        assert torch.equal(await owner.output(), once)


async def test_a_server_takes_both_kinds_of_sessions_and_no_third(loaded: Loaded, owner: Peer):
    async with serving(loaded, FIRST, coding="int8") as first:
        assert first.server.announcement("online").codings == ("int8",)
        await opened(owner, first)
        await opened(owner, first, numeric_class=CODED)
        refused = await owner.ask(first, open_for(first, numeric_class="float32++int4"))
        assert code(refused) == "not_served"
        assert CODED in refused.why


async def test_a_next_hop_that_does_not_know_the_coding_is_refused(loaded: Loaded, owner: Peer):
    """It would end the channel between the two servers, which other sessions share."""
    async with serving(loaded, FIRST, coding="int8") as first, serving(loaded, SECOND) as second:
        refused = await owner.ask(first, open_for(first, numeric_class=CODED, next_record=second.record()))
        assert code(refused) == "bad_request"
        assert first.idle
        request = await opened(owner, first, numeric_class=CODED)
        reroute = Reroute(session=request.session, epoch=1, next_record=second.record())
        assert code(await owner.ask(first, reroute)) == "bad_request"
        plain = await owner.ask(first, open_for(first, next_record=second.record()))
        assert isinstance(plain, Opened)
        taken = reroute.model_copy(update={"next_record": second.record(codings=("int8", "zip"))})
        assert isinstance(await owner.ask(first, taken), Rerouted)


@pytest.mark.parametrize("numeric_class", ["float32", CODED])
async def test_activations_in_another_coding_are_refused_unapplied(loaded: Loaded, owner: Peer, numeric_class: str):
    right, wrong = ("int8", None) if numeric_class == CODED else (None, "int8")
    async with serving(loaded, FIRST, coding="int8") as first:
        request = await opened(owner, first, numeric_class=numeric_class)
        hidden = activations(1, 4)
        refused = await owner.ask(first, *step(request, 1, hidden, coding=wrong))
        assert code(refused) == "bad_activations"
        answer = await owner.ask(first, *step(request, 1, hidden, coding=right))
        assert isinstance(answer, Output)
        assert answer.hidden.coding == right


async def test_a_past_in_another_coding_is_refused(loaded: Loaded, owner: Peer):
    async with serving(loaded, FIRST, coding="int8") as first:
        request = await opened(owner, first, numeric_class=CODED, after_step=1, rebuild=True)
        piece = activations(1, 3)
        refused = await owner.ask(first, rebuild(request, 0, 3, piece), Activations(piece))
        assert code(refused) == "bad_activations"


async def test_coded_numbers_that_are_none_are_refused_unapplied(loaded: Loaded, owner: Peer):
    async with serving(loaded, FIRST, coding="int8") as first:
        request = await opened(owner, first, numeric_class=CODED)
        hidden = activations(1, 4)
        bad = hidden.clone()
        bad[0, 2, 40] = torch.nan
        assert code(await owner.ask(first, *coded_step(request, 1, bad))) == "bad_activations"
        assert isinstance(await owner.ask(first, *coded_step(request, 1, hidden)), Output)
