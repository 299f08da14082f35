"""Marks say that two prompts begin alike to a hop that has seen both from one owner on one route, and nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from swarm.blocks import Blocks
from swarm.protocol.base import Message
from swarm.protocol.codec import decode, encode
from swarm.protocol.marked import Marked
from swarm.protocol.marks import MarkLimits, Marks, Prefix
from swarm.protocol.messages import Open, Rebuild, Step
from swarm.protocol.tensors import meta_of

SIZE = 4
LIMITS = MarkLimits(block_positions=SIZE, tags_max=8)
ROOT, OTHER_ROOT = "a" * 64, "b" * 64
UPSTREAM = (("12D3KooWfirst", Blocks(0, 4), "float32"),)
SECRET = b"s" * 32
IDS = st.lists(st.integers(0, 2**31), max_size=60).map(tuple)


def tags(ids, secret=SECRET, root=ROOT, numeric_class="float32", upstream=UPSTREAM):
    prefix = Prefix(secret, ids, MarkLimits(block_positions=16, tags_max=8))
    marks = prefix.marks(root, numeric_class, upstream)
    return () if marks is None else marks.tags


@given(common=IDS, one=IDS, other=IDS)
def test_tags_are_equal_up_to_the_block_where_prompts_part(common, one, other):
    first, second = common + one, common + other
    same = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(min(first, second, key=len))
    )
    equal = [a == b for a, b in zip(tags(first), tags(second), strict=False)]
    assert equal == [(i + 1) * 16 <= same for i in range(len(equal))]


@given(ids=IDS)
def test_last_token_and_those_beyond_the_limit_are_not_marked(ids):
    assert len(tags(ids)) == min(8, max(0, len(ids) - 1) // 16)


def test_secret_model_class_and_each_hop_before_change_every_tag():
    ids = tuple(range(50))
    others = [
        tags(ids, secret=b"t" * 32),
        tags(ids, root=OTHER_ROOT),
        tags(ids, numeric_class="bfloat16"),
        tags(ids, upstream=()),
        tags(ids, upstream=(("12D3KooWother", Blocks(0, 4), "float32"),)),
        tags(ids, upstream=(("12D3KooWfirst", Blocks(0, 4), "float32+int8"),)),
        tags(ids, upstream=(("12D3KooWfirst", Blocks(0, 3), "float32"), ("12D3KooWsecond", Blocks(3, 4), "float32"))),
    ]
    every = [tag for each in (tags(ids), *others) for tag in each]
    assert len(set(every)) == len(every) == 8 * 3


def test_secret_and_ids_are_not_in_a_log():
    assert "115, 115" not in repr(Prefix(SECRET, (115, 115)))
    assert str(SECRET) not in repr(Prefix(SECRET, (115, 115)))


def step(keep, tokens, *, epoch=0, rows=1, **changes):
    message = Step(
        session="0" * 32,
        epoch=epoch,
        step=1,
        keep=keep,
        budget_ms=1,
        want=0,
        hidden=meta_of(torch.zeros(rows, tokens, 8)),
    )
    return message.model_copy(update=changes)


def marked(stop=0, blocks=3):
    return Marked(SIZE, tuple(range(blocks)), epoch=0, stop=stop)


@given(pieces=st.lists(st.integers(1, 9), max_size=12), stop=st.integers(0, 12), blocks=st.integers(1, 6))
def test_every_block_is_completed_once_however_the_prompt_is_cut(pieces, stop, blocks):
    progress, at, completed = marked(stop, blocks), stop, []
    for tokens in pieces:
        more = progress.take(step(at, tokens))
        at += tokens
        if more is None:
            break
        completed += more
        assert progress.stop == at
    assert completed == list(range(stop // SIZE, min(blocks, at // SIZE)))[: len(completed)]
    assert completed == sorted(set(completed))


def test_message_that_does_not_go_on_with_the_prompt_completes_nothing():
    piece = Rebuild(session="0" * 32, epoch=0, start=4, total=8, hops=1, hidden=meta_of(torch.zeros(1, 4, 8)))
    others = [
        piece,
        step(3, 4),  # a rollback
        step(5, 4),
        step(4, 4, epoch=1),  # after a reroute
        step(4, 4, rows=2),
        step(4, 4).model_copy(update={"rows": (0,)}),
        step(4, 4, positions=meta_of(torch.zeros(1, 4, dtype=torch.int64))),
        step(4, 4, mask=meta_of(torch.ones(1, 4, dtype=torch.uint8))),
    ]
    assert [marked(4).take(message) for message in others] == [None] * len(others)
    assert marked(4).take(step(4, 4)) == range(1, 2)


def test_largest_open_fits_into_a_header():
    most = MarkLimits()
    marks = Prefix(SECRET, tuple(range(most.tags_max * most.block_positions + 9))).marks(ROOT, "float32", UPSTREAM)
    assert marks is not None
    assert len(marks.tags) == most.tags_max
    request = Open(
        session="f" * 32, epoch=1 << 31, root=ROOT, numeric_class="c" * 64, start=0, stop=1, positions_max=1 << 22,
        rollback_max=4096, batch=256, positions_soon=1 << 22, previous="1" * 60, next_record="A" * 4096,
        after_step=1 << 40, tenant="f" * 32, tokens_max=1 << 48, marks=marks,
    )  # fmt: skip
    assert decode(memoryview(bytearray(b"".join(encode(request))))) == (request, None)


def test_server_of_a_version_before_reads_an_open_with_marks():
    class Before(Message):
        kind: str
        session: str

    marked = {"kind": "open", "session": "f", "marks": {"size": 64, "tags": ["a" * 32]}}
    assert Before.model_validate(marked).session == "f"


@pytest.mark.parametrize(
    "marks", [{"size": 8}, {"size": 8192}, {"tags": ()}, {"tags": ("A" * 32,)}, {"tags": ("a" * 32,) * 513}]
)
def test_marks_out_of_bounds_are_malformed(marks):
    with pytest.raises(ValidationError):
        Marks(**{"size": 64, "tags": ("a" * 32,), **marks})
