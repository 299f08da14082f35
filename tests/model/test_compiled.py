"""Products with weights in 4 bits by compiled code: torch's bits, with any processor's instructions."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import llvmlite.binding as llvm
import pytest
import torch

from swarm.model import compiled as compiled_module
from swarm.model import fourbits, jit
from swarm.model.compiled import Packed, kernels
from swarm.model.eightbits import IntegerMatrix, rounded
from swarm.model.fourbits import FourBitFormat, FourBitMatrix, packed, unsigned
from swarm.model.halfcode import half_code
from swarm.model.integer import joined, products, split
from swarm.model.roundingcode import int4_code, int8_code
from swarm.model.vectorcode import code_of
from tests.support.steps import random

SIZES = [(33, 768), (64, 40), (16, 2048), (300, 2080), (7, 4100)]  # blocks that are not full, and sums of several parts


@pytest.mark.parametrize(("n_outputs", "n_inputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 40])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [IntegerMatrix, FourBitMatrix])
def test_compiled_kernels_compute_the_same_bits(kind, dtype, n_outputs, n_inputs, rows, threads, monkeypatch):
    torch.manual_seed(rows)
    weight = torch.randn(n_outputs, n_inputs) * torch.rand(n_outputs, 1) * 10
    weight[:, 32:64] = 0.0
    matrix, input = kind.of(weight), (torch.randn(rows, n_inputs) * 100).to(dtype)
    torch.set_num_threads(threads)
    try:
        compiled = matrix.multiply(input)
    finally:
        torch.set_num_threads(1)
    monkeypatch.setattr(f"{kind.__module__}.kernels", lambda _: None)
    others = kind.restored((n_outputs, n_inputs), matrix.parts)
    assert compiled.dtype is dtype
    assert torch.equal(compiled, others.multiply(input))
    assert all(torch.equal(part, other) for part, other in zip(matrix.parts, others.parts, strict=True))


def test_a_product_that_its_caller_has_left_reads_no_memory_of_others(monkeypatch):
    """Ctrl-C ends the wait for other threads, which go on."""
    left = []
    matrix, input = IntegerMatrix(*rounded(torch.randn(64, 512))), torch.randn(9, 512)
    monkeypatch.setattr(compiled_module, "_in_threads", lambda work, n_outputs: left.append((work, n_outputs)))
    product = matrix.multiply(input)
    others = [torch.full((9, 2 * 512), 77, dtype=torch.int8) for _ in range(50)]  # of the sizes that were freed
    others += [torch.full((9, 2), 7, dtype=torch.int32) for _ in range(50)]
    others += [torch.full((9,), 7.0) for _ in range(50)]
    ((work, n_outputs),) = left
    work(0, n_outputs)
    monkeypatch.undo()
    assert torch.equal(product, matrix.multiply(input))
    assert len(others) == 150


def test_inputs_that_are_views_are_multiplied_as_they_look():
    matrix, wide = IntegerMatrix.of(random(40, 96)), random(96, 9).bfloat16()
    looks = torch.empty(9, 96, dtype=torch.bfloat16).copy_(wide.t())
    assert torch.equal(matrix.multiply(wide.t()), matrix.multiply(looks))
    mirrored = torch.complex(torch.zeros(9, 96), -looks.float()).conj().imag
    assert mirrored.is_neg()
    assert torch.equal(matrix.multiply(mirrored), matrix.multiply(looks.float()))


def test_sums_are_narrowed_as_torch_does():
    """Halves go to the even number, and the smallest and largest numbers stay what they are."""
    engine = kernels("int8")._compiler.loops("int8")
    bits = torch.randint(-(1 << 31), 1 << 31, (100_003,), dtype=torch.int64).to(torch.int32)
    bits[:6] = torch.tensor([0x3F808000, 0x3F818000, 0x00008000, 0x00018000, 0x7F7FFFFF, 0x7F800000])
    wide, narrow = bits.view(torch.float32), torch.empty(len(bits), dtype=torch.bfloat16)
    engine.narrow(wide.data_ptr(), narrow.data_ptr(), len(bits))
    expected = wide.bfloat16()
    assert torch.equal(narrow.isnan(), expected.isnan())
    assert torch.equal(narrow.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_rows_that_are_no_numbers_and_matrices_without_outputs_are_as_torchs(rows, dtype, monkeypatch):
    input = torch.randn(rows, 96).to(dtype)
    input[0, 3], input[-1, 5], input[rows // 2, 7] = float("inf"), float("nan"), -float("inf")
    for outputs in (0, 5):
        weight = rounded(torch.randn(outputs, 96))
        compiled = IntegerMatrix(*weight).multiply(input)
        if outputs:
            with monkeypatch.context() as patch:
                patch.setattr("swarm.model.eightbits.kernels", lambda _: None)
                assert torch.equal(compiled.isnan(), IntegerMatrix(*weight).multiply(input).isnan())
        assert compiled.shape == (rows, outputs)


def fresh(monkeypatch, weights):
    """Return what `kernels` does in a process that has compiled nothing."""
    monkeypatch.setattr("swarm.model.compiled.compiler", jit.compiler.__wrapped__)
    return kernels.__wrapped__(weights)


def matrices():
    """Weights of several distributions; the last has rows with numbers that are none."""
    torch.manual_seed(3)
    for n_outputs, n_inputs in SIZES:
        normal = torch.randn(n_outputs, n_inputs)
        yield normal * 0.02
        yield normal / torch.rand(n_outputs, n_inputs).clamp(min=1e-3)
        yield normal * (torch.rand(n_outputs, n_inputs) < 0.1)
    normal[1, 5], normal[3, 700], normal[5, 0] = float("nan"), float("inf"), -float("inf")
    yield normal


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("round_", [rounded, packed])
def test_compiled_rounding_gives_the_same_bits(round_, dtype, threads, monkeypatch):
    torch.set_num_threads(threads)
    try:
        compiled = [round_(weight.to(dtype)) for weight in matrices()]
    finally:
        torch.set_num_threads(1)
    monkeypatch.setattr(f"{round_.__module__}.kernels", lambda _: None)
    torchs = [round_(weight.to(dtype)) for weight in matrices()]
    for ours, theirs in zip(compiled, torchs, strict=True):
        for part, other in zip(ours, theirs, strict=True):
            assert torch.equal(part.nan_to_num(-1.0), other.nan_to_num(-1.0))
    assert compiled[-1][-1].isfinite().sum() == len(compiled[-1][-1]) - 3


@pytest.mark.parametrize("target", [("ssse3", "x86-64", "+ssse3"), ("avx2", "x86-64-v3", "")])
@pytest.mark.parametrize("round_", [rounded, packed])
def test_the_rounding_of_older_processors_gives_the_same_bits(round_, target, monkeypatch):
    expected = [round_(weight) for weight in matrices()][:-1]
    monkeypatch.setattr("swarm.model.jit._processor", lambda _: target)
    found = fresh(monkeypatch, "int4" if round_ is packed else "int8")
    monkeypatch.setattr(f"{round_.__module__}.kernels", lambda _: found)
    for weight, parts in zip(matrices(), expected, strict=False):
        assert all(torch.equal(part, other) for part, other in zip(round_(weight), parts, strict=True))


def test_the_least_sum_of_errors_fits_16_bits():
    """Compiled rounding adds up with a largest number; no half block's best table comes near to it."""
    errors, _ = fourbits._errors()
    quarters = torch.arange(-FourBitFormat.quarters, FourBitFormat.quarters + 1).abs()
    for peak, start in enumerate(fourbits._starts().tolist()):
        sought = errors[quarters <= peak, 8 * start : 8 * (start + FourBitFormat.sought)]
        assert FourBitFormat.half * int(sought.amax(0).amin()) < 1 << 16


@pytest.mark.parametrize("kind", ["avx512vnni", "avxvnni", "avx2", "ssse3"])
@pytest.mark.parametrize("weights", ["int8", "int4", "own4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_instructions_of_all_processors_compute_the_same_bits(weights, kind, dtype, monkeypatch):
    has = llvm.get_host_cpu_features()
    if not has.get(kind):
        pytest.skip(f"this processor has no {kind}")
    target = (kind, llvm.get_host_cpu_name(), has.flatten())
    monkeypatch.setattr("swarm.model.jit._processor", lambda _: target)
    compiled = fresh(monkeypatch, weights)
    codes, scales = torch.randint(0, 256, (37, 1200), dtype=torch.uint8), torch.rand(37)
    rows = (100 * random(11, 2400)).to(dtype)
    parts, peak = split(rows.float())
    if weights == "int8":
        integers = torch.randint(-127, 128, (37, 2400), dtype=torch.int8)
        given = Packed("int8", integers, torch.empty(0, dtype=torch.uint8), scales, 75)
        sums = (parts.double() @ integers.double().t()).float() * scales
    elif weights == "int4":
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
    assert torch.equal(compiled.multiply(rows, given), joined(sums, peak).to(dtype))


@pytest.mark.parametrize("kind", ["avx2", "ssse3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_older_processors_multiply_halves_where_they_have_fused_products(dtype, kind, monkeypatch):
    target = (kind, {"avx2": "x86-64-v3", "ssse3": "x86-64"}[kind], "")
    monkeypatch.setattr("swarm.model.jit._processor", lambda _: target)
    found = fresh(monkeypatch, dtype)
    assert (found is None) == (kind == "ssse3")
    if found is not None:
        rows, weight = random(7, 1200), random(37, 1200).to(getattr(torch, dtype))
        assert torch.allclose(found.widened(rows, weight), rows @ weight.float().t(), atol=1e-4)


@pytest.mark.parametrize("weights", ["int8", "int4", "own4", "bfloat16", "float16"])
def test_the_loops_of_arm_compile(weights):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    halves = weights in ("bfloat16", "float16")
    module = llvm.parse_assembly(half_code(weights) if halves else code_of(weights, "neon"))
    module.verify()
    target = llvm.Target.from_triple("aarch64-linux-gnu").create_target_machine("generic", "+neon", opt=3)
    assembly = target.emit_assembly(module)
    assert "tbl" in assembly or weights != "int4"
    assert "fmla" in assembly or not halves


@pytest.mark.parametrize(("code_of", "instruction"), [(int8_code, "frintn"), (int4_code, "uqadd")])
def test_the_rounding_of_arm_compiles(code_of, instruction):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(code_of("bfloat16", 127, 2.0**-100))
    module.verify()
    target = llvm.Target.from_triple("aarch64-linux-gnu").create_target_machine("generic", "+neon", opt=3)
    assert instruction in target.emit_assembly(module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [IntegerMatrix, FourBitMatrix])
def test_torchs_default_dtype_does_not_matter(kind, dtype):
    """It is one for all threads, and `from_pretrained` changes it while it loads."""
    weight, input = random(40, 96, seed=1), random(9, 96, seed=2)
    expected = kind.of(weight).multiply(input)
    torch.set_default_dtype(dtype)
    try:
        found = kind.of(weight).multiply(input)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


def test_what_is_not_on_the_cpu_is_refused():
    matrix, input = IntegerMatrix.of(random(40, 96)), random(2, 96)
    with pytest.raises(NotImplementedError):
        matrix.multiply(input.to("meta"))
    with torch.device("meta"):
        found = matrix.multiply(input)
    assert torch.equal(found, matrix.multiply(input))


def refuse(*_):
    raise RuntimeError("LLVM IR parsing error")


@pytest.mark.parametrize("where", ["llvmlite.binding.parse_assembly", "llvmlite.binding.initialize_native_target"])
def test_where_llvmlite_does_not_work_torch_computes(where, monkeypatch):
    expected = IntegerMatrix.of(random(40, 96)).multiply(random(2, 96))
    monkeypatch.setattr(where, refuse)
    found = fresh(monkeypatch, "int8")
    assert found is None
    monkeypatch.setattr("swarm.model.eightbits.kernels", lambda _: found)
    assert torch.equal(IntegerMatrix.of(random(40, 96)).multiply(random(2, 96)), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that forbids it")
def test_a_process_that_may_not_make_code_has_no_compiled_kernels():
    forbid = "import ctypes; print(ctypes.CDLL(None).prctl(65, 1, 0, 0, 0))"  # PR_SET_MDWE
    code = f"{forbid}\nfrom swarm.model.compiled import kernels\nprint(kernels('int8'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    forbidden, found = done.stdout.split()
    assert forbidden == "-1" or found == "None"  # kernels before 6.3 do not know it


def test_a_thread_that_outlives_the_main_one_goes_on():
    code = """
import threading, time, torch
from swarm.model.eightbits import IntegerMatrix, rounded
def late():
    time.sleep(0.5)
    torch.set_num_threads(2)
    print(IntegerMatrix.of(torch.ones(64, 64)).multiply(torch.ones(2, 64)).sum().item())
threading.Thread(target=late).start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(2 * 64 * 64, rel=1e-3)


def test_without_llvmlite_there_are_no_compiled_kernels(monkeypatch):
    assert kernels("int8") is not None
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    assert fresh(monkeypatch, "int8") is None


def test_threads_that_ask_at_once_compile_once(monkeypatch):
    """A span's kernels are compiled beside the reading of its files, which may be over first."""
    real, compiled, both = jit.Compiler._engine, [], threading.Barrier(2)

    def slow(self, code):
        compiled.append(code)
        time.sleep(0.2)
        return real(self, code)

    def ask():
        both.wait(10)
        assert kernels.__wrapped__("int8") is not None

    monkeypatch.setattr(jit.Compiler, "_engine", slow)
    monkeypatch.setattr("swarm.model.compiled.compiler", cache(jit.compiler.__wrapped__))
    with ThreadPoolExecutor(2) as threads:
        for asked in [threads.submit(ask), threads.submit(ask)]:
            asked.result()
    assert len(compiled) == 1
