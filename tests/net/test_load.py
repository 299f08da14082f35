"""An anchor's load over real sockets: what it tells, to whom, how often, and what other versions notice of it."""

import pytest

from swarm.errors import Unreachable
from swarm.net import greeting
from swarm.net.load import LoadLimits, Told, load_of
from swarm.net.relay import RelayLimits
from swarm.protocol.codec import encode
from swarm.protocol.meeting import LOAD, SPEED_MAX, AnchorInquiry, AnchorLoad, Uncalled
from swarm.protocol.messages import Close
from tests.net.places import limits, places
from tests.net.support import SESSION, until


def told(**changes):
    figures = dict.fromkeys(AnchorLoad.model_fields.keys() - {"kind"}, 0)
    return AnchorLoad(**(figures | changes))


async def test_an_anchor_tells_its_load_and_limits():
    relay = RelayLimits(pairs_max=5, bytes_per_s=1e6)
    async with places() as made:
        anchor = await made.place(limits(relay=relay, moorings_max=7, meetings_max=9, load=LoadLimits(fresh_s=0.0)))
        hidden = await made.hidden(anchor, bounds=limits(punch=False))
        caller, asker = made.caller(limits(punch=False)), made.caller()
        before = await load_of(anchor.via, asker.ways.lines)
        assert before == told(moored=1, moored_max=7, meetings_max=9, pairs_max=5, relayed_bytes_per_s_max=1_000_000)
        channel = await caller.call(anchor, hidden)
        channel.send(Close(session=SESSION))
        await until(lambda: hidden.taken)
        after = await load_of(anchor.via, asker.ways.lines)
        assert (after.pairs, after.meetings) == (1, 0)
        assert after.relayed_bytes_per_s > 0


async def test_a_load_names_no_peer_and_no_single_moment():
    """Any peer may ask, as often as it likes: it must not see when others call."""
    async with places() as made:
        anchor, asker = await made.place(), made.caller()
        before = await load_of(anchor.via, asker.ways.lines)
        await made.hidden(anchor)
        assert anchor.ways.anchor.load.moored == 1
        assert await load_of(anchor.via, asker.ways.lines) == before
    assert {type(value) for name, value in before if name != "kind"} == {int}


def test_the_rate_is_the_mean_since_the_answer_before():
    answers = Told(100.0, LoadLimits(fresh_s=10.0))

    def at(now, relayed_bytes):
        return answers.answer(now, lambda per_s: told(relayed_bytes_per_s=round(per_s)), relayed_bytes)

    assert at(101.0, 500).relayed_bytes_per_s == 50  # as if of ten seconds: a moment says nothing
    assert at(110.9, 9999).relayed_bytes_per_s == 50
    assert at(121.0, 4500).relayed_bytes_per_s == 200
    assert at(221.0, 4500).relayed_bytes_per_s == 0


async def test_questions_for_the_load_are_bounded_like_calls():
    async with places() as made:
        anchor, asker = await made.place(limits(call_burst=2.0, call_per_s=0.1)), made.caller()
        for _ in range(3):  # the bucket lends one
            await load_of(anchor.via, asker.ways.lines)
        with pytest.raises(Unreachable, match=r"too many calls; again in \d+\.\d s"):
            await load_of(anchor.via, asker.ways.lines)
        assert anchor.ways.anchor.load.refused == 1
        with pytest.raises(Unreachable, match="too many calls"):
            await asker.call(anchor, await made.hidden(anchor))
        await load_of(anchor.via, made.caller().ways.lines)


async def test_an_anchor_that_relays_nothing_says_so():
    async with places() as made:
        anchor = await made.place(limits(relay=RelayLimits(bytes_per_s=0.0)))
        load = await load_of(anchor.via, made.caller().ways.lines)
        assert (load.pairs_max, load.relayed_bytes_per_s_max) == (0, 0)


async def test_an_anchor_tells_no_number_that_others_reject():
    async with places() as made:
        anchor = await made.place(limits(relay=RelayLimits(bytes_per_s=1e15)))
        load = await load_of(anchor.via, made.caller().ways.lines)
        assert load.relayed_bytes_per_s_max == SPEED_MAX


async def test_an_anchor_of_a_former_version_is_not_asked(monkeypatch):
    """It would take the question for garbage, and end the line with all calls on it."""

    def former(hello):
        return encode(hello.model_copy(update={"loads": False}))

    monkeypatch.setattr(greeting, "encode", former)
    async with places() as made:
        anchor, asker = await made.place(), made.caller()
        line = await asker.ways.lines.open(anchor.via)
        with pytest.raises(Unreachable, match="its version does not tell its load"):
            await load_of(anchor.via, asker.ways.lines)
        assert not line.closed
        assert anchor.ways.anchor._rates == {}


async def test_an_anchor_that_does_not_answer_is_left(monkeypatch):
    async with places() as made:
        anchor, asker = await made.place(), made.caller()
        monkeypatch.setattr(anchor.ways.anchor, "_tell", lambda channel: None)
        with pytest.raises(Unreachable, match="does not tell its load"):
            await load_of(anchor.via, asker.ways.lines, LoadLimits(answer_s=0.1))


@pytest.mark.parametrize(
    "answer", [told(), Uncalled(call=LOAD, cause="busy", why="?"), Uncalled(cause="busy", why="?")]
)
async def test_a_load_answers_no_call_and_no_mooring(answer):
    """An anchor that was asked for one thing may answer another."""
    async with places() as made:
        anchor = await made.place()
        hidden, caller = await made.hidden(anchor), made.caller()
        line = await caller.ways.lines.open(anchor.via)
        await line.ping()
        (at_anchor,) = [
            one for one in anchor.ways.listener.admission.channels if one.peer == caller.me.identity.peer_id
        ]
        at_anchor.send(answer)
        channel = await caller.call(anchor, hidden)
        assert await channel.ping() > 0
        assert hidden.ways.moorings.anchors == (anchor.via,)


async def test_a_peer_without_blocks_or_anchor_takes_no_harm():
    """The question may come to a process that only listens for others' answers."""
    async with places() as made:
        anchor = await made.place()
        hidden = await made.hidden(anchor)
        line = anchor.ways.anchor.moored[hidden.me.identity.peer_id]
        line.send(AnchorInquiry())
        await line.ping()
        assert hidden.ways.moorings.anchors == (anchor.via,)
