"""What one peer may do to a client, and a mistake of the caller's own: neither costs more than itself."""

import asyncio
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from transformers import GenerationConfig, RepetitionPenaltyLogitsProcessor

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.hf.draws import _is_stateless
from swarm.client.hf.lead import Drafting, Lead, _Sender
from swarm.client.session.attempt import _answered
from swarm.client.session.circuit import Circuit, Rebuilding
from swarm.client.session.flight import Flight
from swarm.client.session.inlet import Inlet
from swarm.client.session.leg import Leg
from swarm.client.session.limits import RecoveryLimits
from swarm.client.session.moving import Mover
from swarm.client.session.standing import Layout
from swarm.client.speculation.limits import AheadLimits
from swarm.client.speculation.pipe import Frame
from swarm.errors import EdgeDown, HopFailed, NoRoute, Refused, UsageError
from swarm.identity import Identity
from swarm.protocol import messages as wire
from swarm.protocol.outbox import Ticket
from swarm.protocol.tensors import meta_of
from tests.client.test_lead import Route
from tests.client.test_route import planned, request, server
from tests.client.test_session import IDS, eventually, leases

SESSION = "0" * 32
NAMES = {"session": SESSION, "epoch": 1}


# Plans


@pytest.mark.parametrize("optimize", ["latency", "throughput"])
@pytest.mark.parametrize(("tps", "load"), [(1e-6, 1e6), (1e9, 1e6), (1e-6, 0.0)])
def test_a_claim_of_no_speed_is_compared_with_the_others(tps, load, optimize):
    slow = [server(0, 4, tps=tps, load=load), server(4, 6, tps=tps, load=load)]
    fast = [server(0, 3, tps=50.0), server(3, 6, tps=50.0)]
    route = planned(Blocks(0, 6), [*slow, *fast], optimize=optimize)
    wanted = {signed.announcement.peer_id for signed in fast}
    assert {hop.peer_id for hop in route.hops} == wanted or tps == 1e9


@pytest.mark.parametrize("tps", [0.0, 1e-320, 1e-300, 9.9e-7])
def test_a_claim_whose_inverse_is_no_number_is_no_record(tps):
    with pytest.raises(ValidationError, match="decode_tps"):
        server(0, 4, tps=tps)


def test_a_peer_has_one_vote_on_what_is_ordinary():
    honest = [server(0, 6, tps=50.0) for _ in range(5)]
    boaster = Identity.generate()
    many = [server(start, 6, tps=1e9, identity=boaster, state="draining") for start in range(6)]
    many += [server(0, stop, tps=1e9, identity=boaster, rtts=()) for stop in range(1, 6)]
    wanted = request(Blocks(0, 6), [*honest, *many])
    assert wanted.ordinary_ms == request(Blocks(0, 6), honest).ordinary_ms
    near = [server(0, 6, rtts=((honest[0], 20.0),)) for _ in range(3)]
    close = [server(start, 6, identity=boaster, rtts=((honest[0], 0.1),)) for start in range(6)]
    assert request(Blocks(0, 6), [*near, *close]).ordinary_rtt_ms == 20.0


# Sessions


async def test_a_reply_in_the_last_moment_counts():
    loop, reply = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(_answered([reply], [SimpleNamespace()], 0.01, "no answer"))
    await asyncio.sleep(0)
    loop.call_at(loop.time() + 0.005, reply.set_result, "there")
    loop.call_soon(time.sleep, 0.05)  # both are due then, in the same turn
    assert await waiting == ["there"]


async def test_whatever_a_flight_meets_every_step_has_an_outcome():
    async def collect(ticket, deadline):
        raise RuntimeError("unexpected")

    quiet = {name: lambda *_, **__: None for name in ("resend", "put", "clear", "forget_guesses")}
    steps = SimpleNamespace(**{**quiet, "put": lambda *_, **__: SimpleNamespace()})
    travel = SimpleNamespace(steps=steps, collect=collect, restorer=SimpleNamespace(repairs=0))
    mover = SimpleNamespace(is_asked=False, rest=lambda: None)
    ended = []
    flight = Flight(
        asyncio.Lock(), travel, nullcontext(), mover, failed=lambda error: ended.append(error) or error, timeout_s=5
    )
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # the task's error is nobody's
    answers = [flight.put(SimpleNamespace(keep=0), restart=False) for _ in range(3)]
    async with asyncio.timeout(5):
        for answer in answers:
            with pytest.raises(RuntimeError, match="unexpected"):
                await answer
    assert len(ended) == 1


async def test_a_hop_that_repeats_itself_is_noted_once():
    circuit = Circuit(SESSION, SimpleNamespace())
    edge, busy = ("a", "b"), {"span": "0:4", "why": "full", "retry_after_s": 1.0}
    for _ in range(1000):
        circuit.report(EdgeDown(edge, "it said so", blocked=False))
        circuit.report(EdgeDown(("b", "c"), "it said so", blocked=False))
        circuit.report(Refused("peer", code="busy", **busy))
        circuit.report(Refused("peer", code="no_room", **busy))
    assert len(circuit.take_faults()) == 4
    circuit.report(EdgeDown(edge, "again", blocked=False))
    assert len(circuit.take_faults()) == 1


def inlet(relayed=(), lacking=None):
    """An inlet of three hops with one step in flight. Returns it, its circuit, and what the hops were sent."""
    legs = tuple(Leg(hop) for hop in planned(Blocks(0, 6), [server(0, 2), server(2, 4), server(4, 6)]).hops)
    sent = []
    for leg in legs:
        leg.channel = SimpleNamespace(send=lambda *given, **_: sent.append(given), unreachable=False)
    circuit = Circuit(SESSION, SimpleNamespace())
    circuit.layout = Layout(1, legs, frozenset(relayed))
    circuit.rebuilding = lacking and Rebuilding(frozenset(lacking), 9, None)
    hidden = torch.zeros(1, 1, 8)
    message = wire.Step(**NAMES, step=1, keep=4, want=1, budget_ms=1, hidden=meta_of(hidden))
    ticket = Ticket(message, Activations(hidden))
    steps = SimpleNamespace(in_flight=lambda _: ticket, awaited=lambda _: ticket, coding=None, form=(1, 8))
    return Inlet(circuit, steps, lambda _: None, lambda: 0.0, RecoveryLimits()), circuit, sent


def test_a_hop_that_answers_nothing_may_have_got_nothing():
    taken, circuit, _ = inlet()
    taken.on_message(circuit.layout.legs[2].channel, wire.Output(**NAMES, step=1), None)
    (fault,) = circuit.take_faults()
    assert isinstance(fault, EdgeDown)
    assert fault.edge == circuit.layout.edge(1)
    taken, circuit, _ = inlet(relayed=[1])
    taken.on_message(circuit.layout.legs[1].channel, wire.Step(**NAMES, step=1, keep=4, want=1, budget_ms=1), None)
    assert circuit.take_faults()[0].edge == circuit.layout.edge(0)
    taken, circuit, _ = inlet(relayed=[0, 1])
    taken.on_message(circuit.layout.legs[1].channel, wire.Step(**NAMES, step=1, keep=4, want=1, budget_ms=1), None)
    assert isinstance(circuit.take_faults()[0], HopFailed)


def test_a_relayed_step_is_the_clients_own():
    taken, circuit, sent = inlet(relayed=[0])
    hidden, positions = torch.ones(1, 1, 8), torch.tensor([[-1]])
    beside = {"positions": meta_of(positions), "mask": meta_of(positions.to(torch.uint8))}
    told = wire.Step(**NAMES, step=1, keep=9, want=7, rows=(0, 0), budget_ms=0, hidden=meta_of(hidden), **beside)
    given = Activations(hidden, positions, positions.to(torch.uint8))
    taken.on_message(circuit.layout.legs[0].channel, told.model_copy(update={"skips": True}), given)
    ((message, activations),) = sent
    assert (message.keep, message.want, message.rows, message.budget_ms, message.skips) == (4, 1, None, 1, None)
    assert (message.positions, message.mask, activations.positions, activations.mask) == (None,) * 4
    assert torch.equal(activations.hidden, hidden)


@pytest.mark.parametrize(("lacking", "count"), [(None, 0), ({2}, 0), ({1}, 1)])
def test_pieces_of_a_past_go_on_to_hops_that_lack_it(lacking, count):
    taken, circuit, sent = inlet(relayed=[0], lacking=lacking)
    hidden = torch.ones(1, 1, 8)
    piece = wire.Rebuild(**NAMES, start=0, total=9, hops=1, hidden=meta_of(hidden))
    taken.on_message(circuit.layout.legs[0].channel, piece, Activations(hidden))
    assert len(sent) == count
    assert bool(circuit.layout.legs[1].past) == bool(count)


def test_a_session_that_has_failed_holds_nothing(swarm, model, monkeypatch):
    session = model.backend.open_session(Blocks(0, 6), positions_max=8, rollback_max=0)
    session.step(Activations(torch.randn(1, 3, 64)), keep=0, rows=None, want=1)
    with pytest.raises((Refused, HopFailed)):
        session.step(Activations(torch.full((1, 1, 64), torch.nan)), keep=3, rows=None, want=1)
    eventually(lambda: leases(swarm) == [(0, 0)] * 3)


# Callers


def test_a_conversation_takes_no_other_rows(model, full):
    with model.inference_session(max_length=64):
        first = model.generate(IDS[:1, :8], max_new_tokens=4, pad_token_id=0)
        with pytest.raises(UsageError, match="has 1 rows, and the input has 2"):
            model.generate(first.repeat(2, 1), max_new_tokens=4, pad_token_id=0)
        again = model.generate(first, max_new_tokens=4, pad_token_id=0)
    assert torch.equal(again, full.generate(IDS[:1, :8], max_new_tokens=8, pad_token_id=0))


@pytest.mark.parametrize("options", [{"use_cache": False}, {"generation_config": GenerationConfig(use_cache=False)}])
def test_a_conversation_is_a_cache(model, options):
    with model.inference_session(max_length=64), pytest.raises(UsageError, match="use_cache=False"):
        model.generate(IDS[:1, :8], max_new_tokens=4, pad_token_id=0, **options)


def test_a_forward_that_failed_leaves_nothing_for_the_next(model, full):
    with torch.no_grad():
        with pytest.raises(IndexError):
            model(torch.full((1, 5), 10**6), logits_to_keep=1)
        hidden = model.model(IDS[:1, :8], use_cache=False).last_hidden_state
        assert torch.allclose(hidden, full.model(IDS[:1, :8]).last_hidden_state, atol=1e-4)


def test_sequences_in_one_row_are_refused_where_stock_keeps_them_apart(model, full):
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with torch.no_grad():
        with pytest.raises(UsageError, match="pass them as rows"):
            model(IDS[:1, :6], position_ids=positions, use_cache=False)
        ours, theirs = (
            each(IDS[:1, :6], position_ids=torch.arange(4, 10)[None], use_cache=False).logits for each in (model, full)
        )
    assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("error", [TypeError, KeyError, torch.OutOfMemoryError])
def test_a_draft_that_fails_is_given_up(error):
    class Failing:
        def propose(self, text, guesses, count):
            raise error("unexpected")

    silent = SimpleNamespace(propose=lambda *_: [])
    lead = Lead(Route(), lambda ids, _: ids[..., None].float(), 64, 100, AheadLimits())
    lead.draws_from(Drafting(lambda: silent, always=True, slow=lambda _: Failing()))
    lead.restart(0, [1, 2, 3])
    lead._draft_on() if lead._drafts_slowly else lead.step(4, Activations(torch.ones(1, 1, 1)))
    eventually(lambda: lead._slow is None)


def test_a_frame_that_cannot_be_sent_has_an_answer():
    def embed(ids, start):
        raise KeyError("unexpected")

    frame = Frame(3, (1, 2))
    _Sender(Route(), embed).send(frame, torch.ones(1, 1, 1))
    with pytest.raises(KeyError, match="unexpected"):
        frame.answer.wait()


def test_a_draft_calls_no_processors_that_may_have_a_state():
    class Counting(RepetitionPenaltyLogitsProcessor):
        calls = 0

    assert _is_stateless(RepetitionPenaltyLogitsProcessor(1.2))
    assert not _is_stateless(Counting(1.2))


async def test_a_hop_that_stays_is_not_left_again_and_again():
    """Each search for another reads the directory."""
    searches, legs = [], planned(Blocks(0, 6), [server(0, 6)]).hops
    process = legs[0].process
    layout = SimpleNamespace(hops=legs)
    circuit = SimpleNamespace(layout=layout, is_closed=False, is_standing=True, session=SESSION)

    async def replace(leaving, deadline):
        searches.append(leaving)
        return False

    mover = Mover(circuit, SimpleNamespace(replace=replace), nullcontext(), asyncio.Lock(), timeout_s=5.0, pause_s=0.5)
    for _ in range(100):
        mover.ask(process)
        await asyncio.sleep(0)
    assert len(searches) == 1
    await asyncio.sleep(0.6)
    mover.ask(process)
    await asyncio.sleep(0.01)
    assert len(searches) == 2


def test_a_record_does_not_choose_how_activations_travel():
    wired = server(0, 6, dtype="float32++int8")
    with pytest.raises(NoRoute):
        planned(Blocks(0, 6), [wired])
