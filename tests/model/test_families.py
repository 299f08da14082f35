"""Every family: spans compute what the stock model computes, to the last bit in fp32.

`make test` runs what nothing else here implies: padded batches and rollbacks on an uneven ring, gathers, parts of
spans, and a changed weight. `make test-long` runs the others.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from swarm.blocks import Blocks
from swarm.errors import BadBlocks, RollbackImpossible, UnsupportedArchitecture
from swarm.model.checkpoint import open_checkpoint
from swarm.model.loading import load_span
from tests.families import BASE, FEW, OFTEN, REFUSED, SPLIT
from tests.model.rings import CUTS, Pair, Ring, difference, save_model, tokens
from tests.support.often import rest_is_long

PairOf = Callable[[str], Pair]

# A prefill, decode, chunks of several tokens after history, beyond the sliding windows of 8, decode again.
STEPS = (9, 1, 1, 7, 1, 11, 1)
EXACT = 0.0
# Stock MiniMax asks its cache about layer 0, a linear one, which answers that there is no past; its masks for chunks
# after history are wrong then. So the reference is one pass over everything: its linear attention sums otherwise.
MINIMAX_ORDER = 1e-3
# A row's result depends on the size of its batch in the last bits: other kernels, other orders of summation.
BATCH_ORDER = 2e-3


def logits_in_steps(session: Ring, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Run STEPS over ids [batch, sum(STEPS)] and put the logits together."""
    parts, past = [], 0
    for count in STEPS:
        stop = past + count
        parts.append(session.step(ids[:, past:stop], None if mask is None else mask[:, :stop]))
        past = stop
    return torch.cat(parts, 1)


def reference(pair: Pair, name: str, ids: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, float]:
    """The stock model's logits, and how far from them the spans may be."""
    if name == "minimax":
        return pair.stock().step(ids, mask), MINIMAX_ORDER
    return logits_in_steps(pair.stock(), ids, mask), EXACT


def alike_runs(kinds: tuple[str, ...]) -> list[tuple[int, int]]:
    """The first longest run of blocks of each kind that is without block 0."""
    found = {}
    for kind in dict.fromkeys(kinds[1:]):
        start = next(i for i in range(1, len(kinds)) if kinds[i] == kind)
        stop = next((i for i in range(start, len(kinds)) if kinds[i] != kind), len(kinds))
        found[kind] = (start, stop)
    return list(found.values()) if len(set(kinds)) > 1 else []


@pytest.mark.long
@pytest.mark.parametrize("name", SPLIT)
def test_logits_are_exact_over_prefill_chunks_after_history_and_decode(pair_of: PairOf, name: str) -> None:
    pair, ids = pair_of(name), tokens(2, sum(STEPS))
    expected, tolerance = reference(pair, name, ids)
    assert difference(logits_in_steps(pair.ring(pair.spans(*CUTS)), ids), expected) <= tolerance


@pytest.mark.long
@pytest.mark.parametrize("name", rest_is_long(SPLIT, FEW))
def test_logits_are_exact_where_a_span_has_only_one_kind_of_block(pair_of: PairOf, name: str) -> None:
    pair, ids = pair_of(name), tokens(1, sum(STEPS), seed=2)
    expected, tolerance = reference(pair, name, ids)
    for start, stop in alike_runs(pair.checkpoint.traits.kinds):
        cuts = [cut for cut in ((0, start), (start, stop), (stop, 6)) if cut[0] < cut[1]]
        assert difference(logits_in_steps(pair.ring(pair.spans(*cuts)), ids), expected) <= tolerance, (start, stop)


@pytest.mark.parametrize("name", rest_is_long(SPLIT, FEW))
def test_left_padded_batches_are_exact(pair_of: PairOf, name: str) -> None:
    pair, ids = pair_of(name), tokens(3, sum(STEPS), seed=3)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[2, :1] = 0
    expected, tolerance = reference(pair, name, ids, mask)
    got = logits_in_steps(pair.ring(pair.spans(*CUTS)), ids, mask)
    real = mask.bool()
    assert difference(got[real], expected[real]) <= tolerance


@pytest.mark.long
@pytest.mark.parametrize("name", rest_is_long(SPLIT, FEW))
def test_interleaved_sessions_do_not_disturb_each_other(pair_of: PairOf, name: str) -> None:
    pair, first_ids, second_ids = pair_of(name), tokens(1, 20, seed=4), tokens(2, 25, seed=5)
    spans = pair.spans(*CUTS)
    alone = pair.ring(spans)
    expected = torch.cat(
        [alone.step(first_ids[:, :12]), alone.step(first_ids[:, 12:13]), alone.step(first_ids[:, 13:])], 1
    )
    first, second = pair.ring(spans), pair.ring(spans)
    got = [first.step(first_ids[:, :12])]
    second.step(second_ids[:, :21])
    got.append(first.step(first_ids[:, 12:13]))
    second.step(second_ids[:, 21:22])
    got.append(first.step(first_ids[:, 13:]))
    assert difference(torch.cat(got, 1), expected) == EXACT


@pytest.mark.parametrize("name", rest_is_long(SPLIT, OFTEN))
def test_a_rolled_back_session_goes_on_as_if_nothing_had_happened(pair_of: PairOf, name: str) -> None:
    pair, ids, wrong = pair_of(name), tokens(2, 30, seed=6), tokens(2, 9, seed=7)
    spans = pair.spans(*CUTS)
    session = pair.ring(spans, rollback_max=10)
    session.step(ids[:, :15])
    session.step(wrong[:, :4])
    if not pair.checkpoint.traits.can_roll_back:
        with pytest.raises(RollbackImpossible):
            session.keep(15)
        assert session.length == 19
        return
    session.keep(17)  # twice in a row, beyond the window
    session.keep(15)
    session.step(wrong[:, 4:])
    session.keep(15)
    got = [session.step(ids[:, 15:16]), session.step(ids[:, 16:])]
    never = pair.ring(spans, rollback_max=10)
    never.step(ids[:, :15])
    assert difference(torch.cat(got, 1), torch.cat([never.step(ids[:, 15:16]), never.step(ids[:, 16:])], 1)) == EXACT


@pytest.mark.long
@pytest.mark.parametrize("name", rest_is_long(SPLIT, OFTEN))
def test_recording_the_past_for_rollbacks_changes_nothing(pair_of: PairOf, name: str) -> None:
    pair, ids = pair_of(name), tokens(1, sum(STEPS), seed=8)
    spans = pair.spans(*CUTS)
    plain, recording = pair.ring(spans), pair.ring(spans, rollback_max=4)
    # Recording convolutions run over all of their past at once: another order of summation.
    tolerance = 1e-3 if {"conv", "linear"} & set(pair.checkpoint.traits.kinds) else EXACT
    assert difference(logits_in_steps(plain, ids), logits_in_steps(recording, ids)) <= tolerance


@pytest.mark.parametrize("name", rest_is_long(SPLIT, FEW))
def test_gather_reorders_repeats_and_selects_rows(pair_of: PairOf, name: str) -> None:
    pair, ids = pair_of(name), tokens(2, 14, seed=9)
    spans = pair.spans(*CUTS)
    for rows in (torch.tensor([1, 0]), torch.tensor([1, 0, 1]), torch.tensor([1])):
        session = pair.ring(spans, rollback_max=0)
        session.step(ids[:, :11])
        session.gather(rows)
        straight = pair.ring(spans)
        straight.step(ids[rows, :11])
        for past in (11, 12):
            step = ids[rows, past : past + 1]
            assert difference(session.step(step), straight.step(step)) <= BATCH_ORDER


@pytest.mark.parametrize("name", rest_is_long(SPLIT, FEW))
def test_a_part_of_a_span_computes_what_a_span_of_those_blocks_does(pair_of: PairOf, name: str) -> None:
    pair, ids = pair_of(name), tokens(2, sum(STEPS), seed=10)
    expected, tolerance = reference(pair, name, ids)
    (whole,) = pair.spans((0, 6))
    parts = [whole.part(Blocks(0, 2)), whole.part(Blocks(2, 3)), whole.part(Blocks(3, 6))]
    assert difference(logits_in_steps(pair.ring(parts), ids), expected) <= tolerance
    assert difference(logits_in_steps(pair.ring([whole]), ids), expected) <= tolerance
    with pytest.raises(BadBlocks):
        parts[1].part(Blocks(2, 4))


@pytest.mark.parametrize("name", rest_is_long(SPLIT, OFTEN))
def test_one_changed_weight_is_noticed(pair_of: PairOf, name: str) -> None:
    pair, ids = pair_of(name), tokens(2, 12, seed=11)
    spans = pair.spans(*CUTS)
    before = pair.ring(spans).step(ids)
    vectors = [weight for key, weight in spans[1].model.named_parameters() if ".3." in key and weight.dim() == 1]
    saved = vectors[-1].clone()
    vectors[-1][0] += 0.5
    after = pair.ring(spans).step(ids)
    vectors[-1].copy_(saved)
    assert difference(after, before) > 1e-4


@pytest.mark.long
@pytest.mark.parametrize("name", rest_is_long(SPLIT, OFTEN))
def test_spans_hold_their_blocks_and_the_client_holds_none(pair_of: PairOf, name: str) -> None:
    pair = pair_of(name)
    of_a_block = {f".{index}." for index in range(6)}
    assert not [key for key, _ in pair.ends.named_parameters() if any(part in key for part in of_a_block)]
    held = [key for span in pair.spans(*CUTS) for key, _ in span.model.named_parameters() if ".3." in key]
    assert held == [key for key, _ in pair.full.named_parameters() if ".3." in key]


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_cannot_be_split_are_refused_by_name(family_dir: Callable[[str], object], name: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=name.split("+", maxsplit=1)[0]):
        open_checkpoint(family_dir(name))


def test_a_parameter_that_stays_in_float32_makes_no_span_of_that_dtype(tmp_path: Path) -> None:
    """flint keeps its attention's sinks so, and they come first."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    config = AutoConfig.for_model("flint", **BASE, **sizes, shared_expert_intermediate_size=32, sliding_window=8)
    checkpoint = open_checkpoint(save_model(config, tmp_path))
    span = load_span(checkpoint, Blocks(0, 3), dtype=torch.bfloat16)
    assert any(parameter.dtype is torch.float32 for parameter in span.model.parameters())
    assert span.dtype is torch.bfloat16
    assert str(span.numeric_class) == "bfloat16"
