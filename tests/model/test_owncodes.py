"""Spans that keep a checkpoint's own codes of 4 bits: exact weights, and bits that depend on nothing but the step."""

import dataclasses

import pytest
import torch

from swarm.activations import Tier, tier_of
from swarm.blocks import Blocks
from swarm.errors import UnsupportedCheckpoint
from swarm.model.checkpoint import open_checkpoint
from swarm.model.classes import numeric_class_of
from swarm.model.eightbits import is_supported
from swarm.model.integer import integers_of, matrices_in, split
from swarm.model.loading import block_bytes, load_span
from swarm.model.owncodes import OwnMatrix
from swarm.model.quantising import quantisation_for
from swarm.model.stored import Grid
from swarm.model.weightcache import WeightCache
from tests.support.often import rest_is_long
from tests.support.quantised import cases, write
from tests.support.steps import alone_and_packed, random, through

BLOCKS = Blocks(1, 3)
FOUR = (
    "gptq",
    "gptq, asymmetric, in another order",
    "gptq, second version",
    "awq",
    "compressed-tensors W4A16",
    "compressed-tensors W4A16, asymmetric, in another order",
)
OFTEN = ("gptq, asymmetric, in another order",)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def spans_of(tmp_path_factory):
    """The plain twin's span, and the one of the checkpoint's own codes."""
    made = {}

    def get(case):
        if case not in made:
            folder = tmp_path_factory.mktemp("format")
            own = open_checkpoint(write(folder, case))
            plain = load_span(open_checkpoint(folder / "plain"), BLOCKS, dtype=torch.float32)
            made[case] = plain, load_span(own, BLOCKS, dtype=torch.float32, quantize="own4"), own
        return made[case]

    return get


@pytest.mark.parametrize("case", rest_is_long(FOUR, OFTEN))
def test_weights_are_exact_and_outputs_as_close_as_activations_of_14_bits(case, spans_of):
    plain, own, _ = spans_of(case)
    state = plain.model.state_dict()
    matrices = matrices_in(own.model)
    assert len(matrices) == 7 * len(BLOCKS)
    for name, matrix in matrices.items():
        _, _, scales, *order = matrix.parts
        weight = (matrix.steps(0, matrix.n_outputs) * scales.float()[..., None]).flatten(1)
        assert torch.equal(weight, state[name] if not order else state[name][:, order[0]])
    hidden = random(1, 24, own.hidden_size)
    got, expected = through(own, hidden), through(plain, hidden)
    assert (got - expected).norm() < 4e-3 * expected.norm()


@pytest.mark.parametrize("case", rest_is_long(FOUR, OFTEN))
def test_class_and_size_are_known_before_anything_is_loaded(case, spans_of):
    plain, own, checkpoint = spans_of(case)
    assert own.numeric_class == numeric_class_of(checkpoint.config, torch.float32, "own4")
    assert tier_of(str(own.numeric_class)) == Tier.FULL
    estimated = block_bytes(checkpoint, torch.float32, "own4")
    order = 0 if "order" not in case else sum(8 * matrix.n_inputs for matrix in matrices_in(own.model).values())
    assert (own.weight_bytes - order) / len(BLOCKS) == pytest.approx(estimated, rel=0.03)
    assert own.weight_bytes - order < 0.32 * plain.weight_bytes / 2  # groups of 32; 0.27 with groups of 128


@pytest.mark.parametrize("case", rest_is_long(FOUR, OFTEN))
def test_a_step_has_the_same_bits_alone_in_a_batch_and_in_chunks(case, spans_of):
    _, span, _ = spans_of(case)
    assert all(torch.equal(*pair) for pair in alone_and_packed(span))
    hidden = random(1, 24, span.hidden_size)
    whole = through(span, hidden)
    assert torch.equal(through(span, hidden[:, :16], hidden[:, 16:]), whole)
    torch.set_num_threads(2)
    try:
        assert torch.equal(through(span, hidden), whole)
    finally:
        torch.set_num_threads(1)


def grid(n_outputs, n_inputs, n_groups):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (n_outputs, n_inputs), generator=generator).to(torch.uint8)
    zeros = torch.randint(0, 16, (n_outputs, n_groups), generator=generator)
    return Grid(codes, zeros, torch.rand(n_outputs, n_groups, generator=generator))


def test_a_group_s_sums_are_exact_at_their_largest():
    codes, zeros = torch.full((40, 4096), 15, dtype=torch.uint8), torch.zeros(40, 2)
    matrix = OwnMatrix.taken(Grid(codes, zeros, torch.ones(40, 2)))
    parts, _ = split(torch.ones(3, 4096))
    sums = parts[:, :2048] @ matrix.steps(0, 40)[:, 0].t()
    assert sums.max() == 63 * 15 * 2048 < 2**24
    assert torch.equal(sums.double(), parts[:, :2048].double() @ matrix.steps(0, 40)[:, 0].t().double())


def test_a_row_is_the_same_alone_and_beside_any_other():
    matrix = OwnMatrix.taken(grid(130, 4096, 32))
    rows = random(33, 4096, seed=2)
    rows[5] *= 1e4  # a stranger's
    together = matrix.multiply(rows)
    assert all(torch.equal(matrix.multiply(rows[index : index + 1])[0], together[index]) for index in range(len(rows)))
    exact = rows.double() @ grid(130, 4096, 32).dense(torch.float32).double().t()
    assert ((together - exact).norm(dim=1) / exact.norm(dim=1)).max() < 1e-3


@pytest.mark.parametrize(("n_outputs", "n_inputs", "n_groups"), [(33, 768, 6), (64, 96, 3), (16, 4096, 2)])
@pytest.mark.parametrize("rows", [1, 8, 9])
@pytest.mark.parametrize("threads", [1, 2])
def test_compiled_kernels_compute_the_same_bits(n_outputs, n_inputs, n_groups, rows, threads, monkeypatch):
    matrix, input = OwnMatrix.taken(grid(n_outputs, n_inputs, n_groups)), 100 * random(rows, n_inputs, seed=rows)
    torch.set_num_threads(threads)
    try:
        compiled = matrix.multiply(input)
    finally:
        torch.set_num_threads(1)
    monkeypatch.setattr("swarm.model.owncodes.kernels", lambda _: None)
    assert torch.equal(compiled, matrix.multiply(input))


@pytest.mark.parametrize("n_groups", [1, 512])  # of 4096 inputs, and of 8
def test_groups_whose_sums_would_not_be_exact_are_not_taken(n_groups):
    assert OwnMatrix.taken(grid(16, 4096, n_groups)) is None


@pytest.mark.long
def test_auto_keeps_a_checkpoints_codes_where_it_has_some(tmp_path, family_dir):
    for number, case in enumerate(cases()):
        if case != "mxfp4":
            chosen = quantisation_for("auto", open_checkpoint(write(tmp_path / str(number), case)), CPU)
            assert chosen.weights == ("own4" if case in FOUR else "int8" if is_supported() else None)
    packing = open_checkpoint(tmp_path / "0" / "quantised").packing
    experts = dataclasses.replace(open_checkpoint(family_dir("mixtral")), packing=packing)
    assert quantisation_for("auto", experts, CPU).weights == ("int8" if is_supported() else None)
    with pytest.raises(UnsupportedCheckpoint, match="its experts are joined"):
        load_span(experts, BLOCKS, quantize="own4")


def test_a_plain_checkpoint_has_no_codes_to_keep(family_dir):
    with pytest.raises(UnsupportedCheckpoint, match="no codes of 4 bits"):
        load_span(open_checkpoint(family_dir("llama")), BLOCKS, quantize="own4")


@pytest.mark.long
def test_the_cache_keeps_none_of_them(tmp_path, spans_of):
    checkpoint = spans_of(OFTEN[0])[2]
    cache = WeightCache(tmp_path)
    span = load_span(checkpoint, BLOCKS, quantize="own4", rounded=cache)
    cache.write()
    assert integers_of(span.model) == "own4"
    assert list(tmp_path.iterdir()) == []
