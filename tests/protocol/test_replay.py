"""A past on its way along a chain of hops, over wires that lose and repeat: there once at each, a window at a time."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm.activations import Activations
from swarm.protocol.journal import Past
from swarm.protocol.messages import Rebuild
from swarm.protocol.replay import (
    Compute,
    PastReceiver,
    PastSender,
    Refuse,
    ReplayLimits,
    ReplayWindow,
    Twice,
    follow_up,
    lacking,
    runs,
)
from swarm.protocol.tensors import meta_of

SESSION = "ab" * 16
WIDTH = 2
TOKEN_BYTES = 4 * WIDTH  # of one row
wires = settings(max_examples=500, suppress_health_check=list(HealthCheck))
many_wires = settings(wires, max_examples=10_000)
Piece = tuple[Rebuild, Activations]


@dataclass
class Hop:
    """A hop of the chain, and the wires to it and from it. relay: the client passes on what comes to it."""

    receiver: PastReceiver
    window: ReplayWindow
    relay: ReplayWindow | None
    from_client: bool
    pieces: list[Piece] = field(default_factory=list)  # on their way here
    confirmations: list[int] = field(default_factory=list)  # on their way back from here
    queue: list[Piece] = field(default_factory=list)
    inputs: list[Activations] = field(default_factory=list)  # that it has computed
    length: int = 0  # positions that it has accepted
    whole: int = 0  # how often it has told the owner that it has all


@dataclass
class Chain:
    """A sender, hops that add one to each number, and an owner."""

    past: tuple[Past, ...]
    limits: ReplayLimits
    hops: int
    relayed: frozenset[int]  # edges to these hops
    epoch: int = 0

    def __post_init__(self) -> None:
        self.total = self.past[-1].stop
        self.largest = 0
        self.chain = [
            Hop(
                PastReceiver(self.total, rebuild=True, limits=self.limits),
                ReplayWindow(self.limits),
                ReplayWindow(self.limits) if index in self.relayed else None,
                index == 0 or index in self.relayed,
            )
            for index in range(self.hops)
        ]
        self.begin()

    def begin(self) -> None:
        """Send from the start, over wires with nothing on them."""
        self.sender = PastSender(
            SESSION, self.epoch, self.past, self.hops, ReplayWindow(self.limits), limits=self.limits
        )
        self.confirmed = False
        self.send()

    def send(self) -> None:
        """As far as there is room: the first piece goes alone."""
        while (piece := self.sender.take()) is not None:
            self.largest = max(self.largest, piece[0].hidden.n_bytes)
            self.pass_to(0, piece)
            bound = self.limits.window_bytes if self.confirmed else 1
            assert self.sender.window.n_bytes < bound + self.largest

    def pass_to(self, index: int, piece: Piece) -> None:
        """Put a piece on the wire to a hop; the client relays some."""
        hop = self.chain[index]
        if hop.relay is not None:
            hop.relay.add(piece[0])
        hop.pieces.append(piece)

    def deliver_piece(self, x: int) -> None:
        hop = self.chain[x % self.hops]
        if not hop.pieces:
            return
        piece = hop.pieces.pop(0)
        if piece[0].epoch != self.epoch:
            return
        match hop.receiver.offer(piece[0], hop.length):
            case Compute(rows, tokens, stop, reserve_bytes):
                assert (rows, tokens) == piece[0].hidden.shape[:2]
                assert stop == piece[0].start + tokens
                assert (reserve_bytes is None) == (piece[0].start > 0)
                hop.receiver.accept(piece[0])
                hop.length = stop
                hop.queue.append(piece)
            case Twice():
                pass
            case Refuse(code, why):
                raise AssertionError(code, why)

    def compute(self, x: int) -> None:
        index = x % self.hops
        hop = self.chain[index]
        if not hop.queue:
            return
        piece, activations = hop.queue.pop(0)
        hop.receiver.computed()
        hop.inputs.append(activations)
        output = activations.with_hidden(activations.hidden + 1)
        follows = follow_up(piece, output, from_owner=hop.from_client)
        assert (follows.onward is None) == (index == self.hops - 1)
        if follows.onward is not None:
            hop.window.add(follows.onward)
            self.pass_to(index + 1, (follows.onward, output))
        if follows.is_last:
            assert hop.receiver.is_whole
        if follows.confirm_sender:
            hop.confirmations.append(follows.stop)
        hop.whole += follows.confirm_owner or (follows.is_last and follows.confirm_sender and hop.from_client)

    def deliver_confirmation(self, x: int) -> None:
        """From a hop to the one before it, or to the sender; through the client if it relays."""
        index = x % self.hops
        hop = self.chain[index]
        if not hop.confirmations:
            return
        stop: int | None = hop.confirmations.pop(0)
        if hop.relay is not None and stop is not None:
            stop = hop.relay.confirmed(stop)
        if stop is None:
            return
        if index == 0:
            if self.sender.confirmed(stop) is not None:
                self.confirmed = True
            self.send()
        elif (news := self.chain[index - 1].window.confirmed(stop)) is not None:
            self.chain[index - 1].confirmations.append(news)

    def lose(self, x: int) -> None:
        """Lose a confirmation behind which there is one of as much, or more; a repeated one may tell of less."""
        confirmations = self.chain[x % self.hops].confirmations
        if len(confirmations) > 1 and max(confirmations[1:]) >= confirmations[0]:
            confirmations.pop(0)

    def repeat(self, x: int) -> None:
        hop = self.chain[x % self.hops]
        if hop.pieces and hop.relay is None:
            hop.pieces.insert(0, hop.pieces[0])
        if hop.confirmations:
            hop.confirmations.append(min(hop.confirmations))

    def reset(self, x: int) -> None:
        """A repair begins anew, with new windows; what is on its way is of an older epoch."""
        if x % 4:
            return
        self.epoch += 1
        for hop in self.chain:
            hop.receiver.reset()
            hop.window = ReplayWindow(self.limits)
            hop.relay = None if hop.relay is None else ReplayWindow(self.limits)
            hop.queue.clear()
            hop.inputs.clear()
            hop.confirmations.clear()
            hop.whole = hop.length = 0
        self.begin()

    def finish(self) -> None:
        while any(hop.pieces or hop.queue or hop.confirmations for hop in self.chain):
            for index in range(self.hops):
                self.deliver_piece(index)
                self.compute(index)
                self.deliver_confirmation(index)

    def check(self) -> None:
        """Every hop has the whole past once, and nothing is on its way any more."""
        expected = [piece.in_order().activations for piece in self.past]
        hidden = torch.cat([each.hidden for each in expected], dim=1)
        for added, hop in enumerate(self.chain):
            assert torch.equal(torch.cat([each.hidden for each in hop.inputs], dim=1), hidden + added)
            masks = [each.mask for each in hop.inputs]
            if self.past[0].activations.mask is not None:
                assert torch.equal(torch.cat(masks, dim=1), torch.cat([each.mask for each in expected], dim=1))
            assert (hop.receiver.is_whole, hop.receiver.under_way, hop.whole) == (True, 0, 1)
            assert not hop.window
            assert not hop.relay
        assert self.sender.done
        assert (self.sender.window.n_bytes, bool(self.sender.window)) == (0, False)


ACTIONS: tuple[Callable[[Chain, int], None], ...] = (
    *[Chain.deliver_piece] * 4,
    *[Chain.compute] * 4,
    *[Chain.deliver_confirmation] * 3,
    *[Chain.lose, Chain.repeat, Chain.reset],
)


@st.composite
def chains(draw) -> Chain:
    """A past of some pieces, and hops that lack it."""
    rows = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    masked = draw(st.booleans())
    order = draw(st.none() | st.lists(st.integers(0, rows - 1), min_size=1, max_size=4))
    past, start = [], 0
    for tokens in lengths:
        numbers = torch.arange(rows * tokens * WIDTH, dtype=torch.float32).view(rows, tokens, WIDTH) + 1000 * start
        mask = (torch.arange(rows * tokens).view(rows, tokens) % 2).to(torch.uint8) if masked else None
        past.append(Past(start, Activations(numbers, None, mask), None if order is None else torch.tensor(order)))
        start += tokens
    chunk_bytes = draw(st.integers(1, 5)) * TOKEN_BYTES * past[0].rows
    hops = draw(st.integers(1, 3))
    relayed = draw(st.frozensets(st.integers(1, 2)))
    limits = ReplayLimits(window_bytes=draw(st.integers(1, 4)) * chunk_bytes, chunk_bytes=chunk_bytes)
    return Chain(tuple(past), limits, hops, frozenset(index for index in relayed if index < hops))


def play(chain: Chain, script: bytes) -> None:
    for byte in script:
        ACTIONS[byte % len(ACTIONS)](chain, byte // len(ACTIONS))
    chain.finish()
    chain.check()


@wires
@given(chains(), st.binary(max_size=200))
def test_past_is_there_once_at_every_hop(chain, script):
    play(chain, script)


@pytest.mark.long
@many_wires
@given(chains(), st.binary(max_size=1000))
def test_many_chains_bring_the_past_to_every_hop(chain, script):
    play(chain, script)


def piece(start: int, tokens: int, total: int = 20, rows: int = 1, hops: int = 1) -> Rebuild:
    """A piece of a past."""
    hidden = meta_of(torch.zeros(rows, tokens, WIDTH))
    return Rebuild(session=SESSION, epoch=0, start=start, total=total, hops=hops, hidden=hidden)


def test_first_piece_goes_alone_and_then_a_window():
    limits = ReplayLimits(window_bytes=3 * TOKEN_BYTES, chunk_bytes=TOKEN_BYTES)
    past = Past(0, Activations(torch.zeros(1, 9, WIDTH)))
    sender = PastSender(SESSION, 3, [past], 2, ReplayWindow(limits), limits)
    first = sender.take()
    assert first is not None
    assert (first[0].start, first[0].total, first[0].hops, first[0].epoch) == (0, 9, 2, 3)
    assert sender.take() is None
    assert not sender.done
    assert sender.confirmed(1) == 1
    assert [taken[0].start for taken in iter(sender.take, None)] == [1, 2, 3]
    assert sender.confirmed(1) is None
    assert sender.confirmed(3) == 3
    assert [taken[0].start for taken in iter(sender.take, None)] == [4, 5]
    assert sender.confirmed(99) == 6
    assert [taken[0].start for taken in iter(sender.take, None)] == [6, 7, 8]
    assert not sender.done  # it is asked once more, with room
    assert sender.confirmed(7) == 7
    assert sender.take() is None
    assert sender.done


@pytest.mark.parametrize(
    ("offered", "verdict"),
    [
        (piece(8, 4), Compute(rows=1, tokens=4, stop=12, reserve_bytes=None)),
        (piece(8, 12), Compute(rows=1, tokens=12, stop=20, reserve_bytes=None)),
        (piece(0, 8), Twice()),
        (piece(7, 4), Twice()),
        (piece(9, 4), Refuse("bad_request", "positions from 9, 8 is the next to rebuild")),
        (piece(8, 13), Refuse("bad_request", "positions from 8, 8 is the next to rebuild")),
        (piece(8, 4, total=31), Refuse("bad_request", "positions from 8, 8 is the next to rebuild")),
        (piece(8, 4, rows=2), Refuse("bad_request", "2 rows, the session has 1")),
    ],
)
def test_hop_says_what_a_piece_is(offered, verdict):
    receiver = PastReceiver(positions_max=30, rebuild=True)
    receiver.accept(piece(0, 8))
    assert receiver.offer(offered, length=8) == verdict
    assert (receiver.next, receiver.under_way) == (8, 1)


def test_activations_of_another_rank_are_refused():
    flat = piece(0, 8).model_copy(update={"hidden": meta_of(torch.zeros(8))})
    verdict = PastReceiver(positions_max=30, rebuild=True).offer(flat, length=0)
    assert isinstance(verdict, Refuse)
    assert verdict.code == "bad_activations"


@pytest.mark.parametrize(("tokens", "reserved"), [(2, 20 * TOKEN_BYTES), (20, 20 * TOKEN_BYTES)])
def test_first_piece_asks_for_the_room_of_a_window(tokens, reserved):
    for window_bytes in (20 * TOKEN_BYTES, 3 * TOKEN_BYTES):
        limits = ReplayLimits(window_bytes=window_bytes)
        verdict = PastReceiver(positions_max=30, rebuild=True, limits=limits).offer(piece(0, tokens), length=0)
        assert isinstance(verdict, Compute)
        assert verdict.reserve_bytes == min(window_bytes, reserved)


def test_whole_session_takes_no_piece():
    receiver = PastReceiver(positions_max=30, rebuild=False)
    assert receiver.is_whole
    assert receiver.offer(piece(5, 4), length=6) == Twice()
    refusal = Refuse("bad_request", "positions from 6, None is the next to rebuild")
    assert receiver.offer(piece(6, 4), length=6) == refusal
    receiver.reset()
    assert not receiver.is_whole
    assert isinstance(receiver.offer(piece(0, 4), length=0), Compute)


def test_past_of_other_rows_may_begin_after_a_reset():
    receiver = PastReceiver(positions_max=30, rebuild=True)
    receiver.accept(piece(0, 8, rows=2))
    receiver.reset()
    assert receiver.under_way == 0
    receiver.accept(piece(0, 8, rows=3))
    assert isinstance(receiver.offer(piece(8, 8, rows=3), length=8), Compute)


@pytest.mark.parametrize(
    ("hops", "stop", "from_owner", "to_sender", "to_owner"),
    [
        (2, 4, True, False, False),
        (2, 20, True, False, True),
        (2, 20, False, False, True),
        (1, 4, False, True, False),
        (1, 20, False, True, True),
        (1, 20, True, True, False),  # its sender is the owner, who hears it once
    ],
)
def test_confirmations_go_to_sender_and_owner(hops, stop, from_owner, to_sender, to_owner):
    output = Activations(torch.zeros(1, 4, WIDTH, dtype=torch.bfloat16))
    follows = follow_up(piece(stop - 4, 4, hops=hops), output, from_owner=from_owner)
    assert (follows.stop, follows.is_last) == (stop, stop == 20)
    assert (follows.confirm_sender, follows.confirm_owner) == (to_sender, to_owner)
    if hops == 1:
        assert follows.onward is None
    else:
        assert follows.onward is not None
        assert (follows.onward.hops, follows.onward.hidden.dtype) == (hops - 1, "bfloat16")


@pytest.mark.parametrize(
    ("empty", "journals", "expected"),
    [
        ({2}, {0, 1}, {2}),
        ({2}, {0}, {1, 2}),
        ({2}, set(), {0, 1, 2}),
        ({1, 4}, {0, 3}, {1, 4}),
        ({1, 4}, {2}, {0, 1, 3, 4}),
        ({0}, {1, 2}, {0}),
    ],
)
def test_hops_between_a_journal_and_an_empty_hop_lack(empty, journals, expected):
    assert lacking(empty, journals) == expected


def test_neighbours_that_lack_form_one_run():
    assert runs({1, 2, 5}) == [(1, 2), (5, 1)]
    assert runs({5, 2, 1, 0, 4}) == [(0, 3), (4, 2)]
    assert runs(()) == []
