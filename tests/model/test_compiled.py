"""Products with weights in 4 bits by compiled code: torch's bits, with any processor's instructions."""

import sys

import llvmlite.binding as llvm
import pytest
import torch

from swarm.model.compiled import Packed, kernels
from swarm.model.fourbits import FourBitMatrix, unsigned
from swarm.model.integer import joined, products, split
from swarm.model.vectorcode import code_of
from tests.support.steps import random

SIZES = [(33, 768), (64, 40), (16, 2048), (24, 2080), (7, 4100)]  # blocks that are not full, and sums of several parts


@pytest.mark.parametrize(("n_outputs", "n_inputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 40])
@pytest.mark.parametrize("threads", [1, 2])
def test_compiled_kernels_compute_the_same_bits(n_outputs, n_inputs, rows, threads, monkeypatch):
    torch.manual_seed(rows)
    weight = torch.randn(n_outputs, n_inputs) * torch.rand(n_outputs, 1) * 10
    weight[:, 32:64] = 0.0
    matrix, input = FourBitMatrix.of(weight), torch.randn(rows, n_inputs) * 100
    torch.set_num_threads(threads)
    try:
        compiled = matrix.multiply(input)
    finally:
        torch.set_num_threads(1)
    monkeypatch.setattr("swarm.model.fourbits.kernels", lambda: None)
    assert torch.equal(compiled, matrix.multiply(input))


@pytest.mark.parametrize("kind", ["avx512vnni", "avxvnni", "avx2", "ssse3"])
@pytest.mark.parametrize("weights", ["int4", "own4"])
def test_the_instructions_of_all_processors_compute_the_same_bits(weights, kind, monkeypatch):
    has = llvm.get_host_cpu_features()
    if not has.get(kind):
        pytest.skip(f"this processor has no {kind}")
    target = (kind, llvm.get_host_cpu_name(), has.flatten())
    monkeypatch.setattr("swarm.model.compiled._processor", lambda _: target)
    compiled = kernels.__wrapped__()
    codes, scales = torch.randint(0, 256, (37, 1200), dtype=torch.uint8), torch.rand(37)
    rows = 100 * random(11, 2400)
    parts, peak = split(rows)
    if weights == "int4":
        numbers = torch.randint(0, 256, (37, 150), dtype=torch.uint8)
        matrix = FourBitMatrix(2400, codes, numbers, scales)
        sums, given = (
            products(parts, matrix.steps(0, 37)) * scales,
            Packed("int4", codes, numbers, scales, 64, unsigned()),
        )
    else:
        zeros, scales = torch.randint(0, 16, (37, 25), dtype=torch.int8), torch.rand(37, 25)
        steps = torch.stack([codes & 15, codes >> 4], -1).view(37, 25, 96) - zeros[..., None].float()
        sums, given = torch.zeros(22, 37), Packed("own4", codes, zeros, scales, 3)
        for group in range(25):
            sums += parts[:, 96 * group : 96 * group + 96] @ steps[:, group].t() * scales[:, group]
    assert torch.equal(compiled.multiply(rows, given), joined(sums, peak))


@pytest.mark.parametrize("weights", ["int4", "own4"])
def test_the_loops_of_arm_compile(weights):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(code_of(weights, "neon"))
    module.verify()
    target = llvm.Target.from_triple("aarch64-linux-gnu").create_target_machine("generic", "+neon", opt=3)
    assembly = target.emit_assembly(module)
    assert "tbl" in assembly or weights == "own4"


def test_without_llvmlite_there_are_no_compiled_kernels(monkeypatch):
    assert kernels() is not None
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    assert kernels.__wrapped__() is None
