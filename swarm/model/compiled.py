"""Products compiled by LLVM (`llvmlite`), where that is installed, and the rounding of weights to integers.

Products with integers are those of `swarm.model.eightbits`, `.fourbits` and `.owncodes`, which compute the same bits by
torch's operations, many times as slowly. Products with halves are for processors that multiply float32 alone. The loops
are those of `swarm.model.vectorcode`, `.halfcode` and `.roundingcode`. They take plain addresses, so this module alone
says which tensors fit together.
"""

import ctypes
import importlib
import mmap
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import structlog
import torch
from torch import Tensor

from swarm.model.halfcode import Half, half_code, outputs_of
from swarm.model.integer import IntegerFormat
from swarm.model.roundingcode import Dtype, int4_code, int8_code
from swarm.model.vectorcode import Kind, Weights, code_of, octets_of

_log = structlog.get_logger("swarm.compiled")


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [out, in] in integers, all of it contiguous, and filled up to blocks of 32 inputs.

    codes: uint8 [out, blocks * 16], or of int8 the weights, int8 [out, blocks * 32]. numbers: int4's, uint8
    [out, blocks * 2], own4's zeros, int8 [out, chunks], or none. scales: float32 [out], or own4's [out, chunks]. chunk:
    how many blocks are added up as integers. tables: int4's steps, with 128 more: uint8 [256, 16].
    """

    weights: Weights
    codes: Tensor
    numbers: Tensor
    scales: Tensor
    chunk: int
    tables: Tensor | None = None
    rows: tuple[tuple[int, int], ...] = field(init=False)  # of codes, numbers, scales: address, and octets of an output

    def __post_init__(self) -> None:
        octets = {"int8": torch.int8, "int4": torch.uint8, "own4": torch.uint8}[self.weights]
        for tensor, dtype in ((self.codes, octets), (self.scales, torch.float32)):
            assert tensor.dtype is dtype and tensor.device.type == "cpu" and tensor.is_contiguous()  # noqa: PT018
        parts = self.codes, self.numbers, self.scales
        rows = tuple((each.data_ptr(), each.stride(0) * each.element_size()) for each in parts)
        object.__setattr__(self, "rows", rows)


@dataclass(frozen=True, slots=True)
class Search:
    """How int4's tables are sought, for weights in quarters of a step from the least to the largest, contiguous.

    errors: uint16 [weights, 256], squared, of each table. ends: int16 [256, 16], the last weight of each of its codes.
    starts: uint8 [(weights + 1) / 2], the first size that is sought, by a half block's largest weight. shares: uint16
    [32 * blocks], how much the errors of each input of a matrix count; None: all alike.
    """

    errors: Tensor
    ends: Tensor
    starts: Tensor
    shares: Tensor | None = None


class CompiledKernels:
    """The products on this processor, with as many threads as torch has in the caller's thread."""

    def __init__(
        self,
        loops_of: Callable[[Weights], "Loops"],
        halves_of: Callable[[Half], "Halves"],
        rounding: Callable[..., "Rounding"],
    ) -> None:
        self._loops_of, self._halves_of, self._rounding = loops_of, halves_of, rounding

    def prepare(self, weights: Weights | Half) -> None:
        """Compile the products. Raises whatever LLVM does."""
        if weights == "bfloat16" or weights == "float16":  # noqa: PLR1714 - so that types are told apart
            self._halves_of(weights)
        else:
            self._loops_of(weights)

    def rounded(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Round a matrix to int8: [out, in], to integers and scales as `eightbits.rounded` has them."""
        weight = _readable(weight)
        round_ = self._rounding("int8", weight.dtype).round
        integers, scales = _new(torch.int8, *weight.shape), _new(torch.float32, len(weight))

        def work(start: int, stop: int) -> None:
            ours = [_address(each, start) for each in (weight, integers, scales)]
            round_(*ours, stop - start, weight.shape[1])

        _in_threads(work, len(weight))
        return integers, scales

    def sought(self, weight: Tensor, search: Search) -> tuple[Tensor, Tensor, Tensor]:
        """Round a matrix to int4: [out, in], to codes, numbers and scales as `fourbits.packed` has them."""
        weight = _readable(weight)
        round_ = self._rounding("int4", weight.dtype, weighed=search.shares is not None).round
        n_outputs, n_inputs = weight.shape
        blocks = -(-n_inputs // 32)
        codes, numbers = (_new(torch.uint8, n_outputs, size * blocks) for size in (16, 2))
        scales = _new(torch.float32, n_outputs)
        tables = search.errors, search.ends, search.starts, search.shares
        looked_up = [0 if each is None else each.data_ptr() for each in tables]

        def work(start: int, stop: int) -> None:
            quarters = _new(torch.int16, 32 * blocks)
            ours = [_address(each, start) for each in (codes, numbers, scales)]
            round_(_address(weight, start), *looked_up, quarters.data_ptr(), *ours, stop - start, n_inputs, blocks)

        _in_threads(work, n_outputs)
        return codes, numbers, scales

    def multiply(self, rows: Tensor, matrix: Packed) -> Tensor:
        """Multiply activations by weights: float32 [positions, in] -> [positions, out]."""
        loops, rows = self._loops_of(matrix.weights), _plain(rows)
        (positions, n_inputs), (n_outputs, octets) = rows.shape, matrix.codes.shape
        blocks, chunk = octets // (32 if matrix.weights == "int8" else 16), matrix.chunk
        chunks, padded = -(-blocks // chunk), -(-blocks // 2) * 64
        # Parts, sums and factors in one piece: each further one takes as long as to split a row.
        sizes = 2 * padded, 8, 4  # octets of a position
        room = _new(torch.uint8, positions * (2 * padded + 8 * chunks + 4))
        output = _new(torch.float32, positions, n_outputs)
        parts = room.data_ptr()
        sums = parts + positions * 2 * padded
        places = parts, sums, sums + positions * 8 * chunks
        sections, first = [], 0  # of positions that go together
        for tile, multiply in loops.multiply.items():
            if groups := (positions - first) // tile:
                given = [place + first * size for place, size in zip(places, sizes, strict=True)]
                split = n_inputs, padded, 32 * chunk, tile, loops.octets[tile], 2 * positions
                loops.split(rows.data_ptr() + 4 * first * n_inputs, *given, groups * tile, *split)
                sections.append((multiply, given, output.data_ptr() + 4 * first * n_outputs, groups))
                first += groups * tile
        tables = 0 if matrix.tables is None else matrix.tables.data_ptr()

        def work(start: int, stop: int, _held: tuple[Tensor, ...] = (room, output)) -> None:
            """Compute some outputs. It holds the tensors, since a caller may be interrupted while threads go on."""
            ours = [address + start * size for address, size in matrix.rows]
            for multiply, given, results, groups in sections:
                sizes = groups, stop - start, blocks, chunk, padded, 2 * positions, n_outputs
                multiply(*ours, tables, *given, results + 4 * start, *sizes)

        def in_pieces(start: int, stop: int) -> None:
            """Do it for so many outputs at once that their weights stay in a core's cache while all positions pass."""
            most = max(16, (1 << 18) // octets) if positions > max(loops.multiply) else max(1, n_outputs)
            for first in range(start, stop, most):
                work(first, min(first + most, stop))

        _in_threads(in_pieces, n_outputs)
        return output

    def widened(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply activations by weights in half precision: [positions, in] and [out, in] -> float32 [positions, out].

        Inputs are a multiple of 8. Raises RuntimeError for others.
        """
        (positions, n_inputs), n_outputs = rows.shape, len(weight)
        if n_inputs % 8:
            raise RuntimeError(f"compiled products take multiples of 8 inputs, not {n_inputs}")
        halves = self._halves_of("bfloat16" if weight.dtype is torch.bfloat16 else "float16")
        rows, weight = _plain(rows), _in_memory(weight)
        output = _new(torch.float32, positions, n_outputs)

        def work(start: int, stop: int) -> None:
            """Compute some outputs. It holds the tensors, as above."""
            first, results = 0, output.data_ptr() + start * output.element_size()
            for tile, multiply in halves.multiply.items():
                if groups := (positions - first) // tile:
                    theirs = _address(rows, first), results + first * output.stride(0) * output.element_size()
                    multiply(_address(weight, start), *theirs, groups, stop - start, n_inputs, n_outputs)
                    first += groups * tile

        _in_threads(work, n_outputs)
        return output


@dataclass(frozen=True, slots=True)
class Loops:
    """Loops of `swarm.model.vectorcode`. multiply, octets: by the number of positions. engine: owns their code."""

    split: Callable[..., None]
    multiply: Mapping[int, Callable[..., None]]
    octets: Mapping[int, int]
    engine: object


@dataclass(frozen=True, slots=True)
class Halves:
    """Loops of `swarm.model.halfcode`, by the number of positions. engine: owns their code."""

    multiply: Mapping[int, Callable[..., None]]
    engine: object


@dataclass(frozen=True, slots=True)
class Rounding:
    """The loop of `swarm.model.roundingcode`. engine: owns its code."""

    round: Callable[..., None]
    engine: object


_compiling = threading.Lock()  # or two threads would compile the same
_cpu = torch.device("cpu")


def prepare_kernels(kinds: Iterable[Weights | Half]) -> None:
    """Compile the kernels for some kinds of weights beside the caller, which reads files meanwhile.

    A process that ends waits for it: LLVM must not be taken down while it works.
    """
    threading.Thread(target=lambda: [kernels(weights) for weights in kinds], name="compile").start()


@cache
def kernels(weights: Weights | Half) -> CompiledKernels | None:
    """Return the kernels for a kind of weights, compiled once in a process.

    None where there are none, or where they do not run: of an old `llvmlite`, or where a process may not make code.
    """
    if not is_installed() or not _may_make_code():
        return None
    try:
        with _compiling:
            found = _kernels()
            if found is not None:
                found.prepare(weights)
    except Exception as error:  # noqa: BLE001 - a library that does not load or compile; torch computes the same bits
        _log.warning("no compiled products", weights=weights, why=str(error)[:200] or repr(error))
        return None
    return found


@cache
def _kernels() -> CompiledKernels | None:
    """Return the kernels of this processor, none of which is compiled yet. None: there are no loops for it."""
    llvm = importlib.import_module("llvmlite.binding")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    processor = _processor(llvm)
    if processor is None:
        return None
    loops, halves = cache(partial(_loops, llvm, processor)), cache(partial(_halves, llvm, processor))
    return CompiledKernels(loops, halves, cache(partial(_rounding, llvm, processor)))


def is_installed() -> bool:
    """Whether there is `llvmlite`, without the time that importing it takes."""
    return find_spec("llvmlite") is not None


def _processor(llvm: Any) -> tuple[Kind, str, str] | None:  # noqa: ANN401 - a module without types
    """Return which instructions to use, and LLVM's names of processor and features: no more than torch may use here.

    None: there are no loops for this processor.
    """
    has, told = llvm.get_host_cpu_features(), os.environ.get("ATEN_CPU_CAPABILITY", "").lower()
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "neon", llvm.get_host_cpu_name(), has.flatten()
    if not has.get("ssse3"):
        return None
    if told == "default" or not has.get("avx2"):
        return "ssse3", "x86-64", "+ssse3"
    if told == "avx2":
        return "avx2", "x86-64-v3", ""
    kind: Kind = "avxvnni" if has.get("avxvnni") else "avx2"
    if has.get("avx512vnni") and has.get("avx512vl"):
        kind = "avx512vnni"
    return kind, llvm.get_host_cpu_name(), has.flatten()


def _loops(llvm: Any, processor: tuple[Kind, str, str], weights: Weights) -> Loops:  # noqa: ANN401 - as above
    """Compile the loops for one kind of weights."""
    kind, *target = processor
    engine = _compiled(llvm, target, code_of(weights, kind))
    address, count = ctypes.c_void_p, ctypes.c_int64
    split, multiply = (ctypes.CFUNCTYPE(None, *[address] * a, *[count] * b) for a, b in ((4, 7), (8, 7)))
    at = engine.get_function_address
    octets = octets_of(weights, kind)
    loops = {tile: multiply(at(f"multiply_{tile}")) for tile in octets}
    return Loops(split(at("split")), loops, octets, engine)


def _halves(llvm: Any, processor: tuple[Kind, str, str], dtype: Half) -> Halves:  # noqa: ANN401 - as above
    """Compile the products with halves. Raises RuntimeError where a processor cannot widen and add in one step."""
    kind, *target = processor
    if kind == "ssse3":
        raise RuntimeError("this processor has no fused products")
    engine = _compiled(llvm, target, half_code(dtype))
    multiply, at = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 4), engine.get_function_address
    return Halves({tile: multiply(at(f"multiply_{tile}")) for tile in outputs_of()}, engine)


def _rounding(
    llvm: Any,  # noqa: ANN401 - as above
    processor: tuple[Kind, str, str],
    weights: Weights,
    dtype: torch.dtype,
    *,
    weighed: bool = False,
) -> Rounding:
    """Compile the rounding to int8 or int4 of weights of a dtype. weighed: int4's errors count by their inputs."""
    name: Dtype = "bfloat16" if dtype is torch.bfloat16 else "float32"
    steps, least = IntegerFormat.weight_steps, IntegerFormat.least
    code, addresses, counts = int8_code(name, steps, least), 3, 2
    if weights == "int4":
        code, addresses, counts = int4_code(name, steps, least, weighed=weighed), 9, 3
    engine = _compiled(llvm, processor[1:], code)
    types = [ctypes.c_void_p] * addresses + [ctypes.c_int64] * counts
    return Rounding(ctypes.CFUNCTYPE(None, *types)(engine.get_function_address("round")), engine)


def _compiled(llvm: Any, target: Sequence[str], code: str) -> Any:  # noqa: ANN401 - as above
    """Compile a module. target: LLVM's names of the processor and its features. Returns the engine that has it."""
    name, features = target
    module = llvm.parse_assembly(code)
    machine = llvm.Target.from_default_triple().create_target_machine(name, features, opt=3, jit=True)
    module.triple, module.data_layout = llvm.get_default_triple(), str(machine.target_data)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = True
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


def _may_make_code() -> bool:
    """Whether this process may run memory that it has written: systemd and SELinux can forbid it, and LLVM crashes."""
    if sys.platform != "linux":
        return True
    space = mmap.mmap(-1, mmap.PAGESIZE)
    place = ctypes.c_char.from_buffer(space)
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return int(protect(ctypes.addressof(place), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC)) == 0


def _new(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return memory for compiled code, whatever torch's defaults are in this thread and in others."""
    return torch.empty(shape, dtype=dtype, device=_cpu)


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor as compiled products read it: float32, in one piece. Raises NotImplementedError off the CPU."""
    return _in_memory(tensor.to(torch.float32))


def _readable(tensor: Tensor) -> Tensor:
    """Return a tensor of weights as compiled code reads it: float32 or bfloat16, in one piece. Raises as `_plain`."""
    if tensor.dtype not in (torch.float32, torch.bfloat16):
        tensor = tensor.to(torch.float32)
    return _in_memory(tensor)


def _in_memory(tensor: Tensor) -> Tensor:
    """Return a tensor in one piece. Raises NotImplementedError off the CPU."""
    if not tensor.is_cpu:
        raise NotImplementedError(f"compiled code takes tensors on the CPU, not on {tensor.device}")
    return tensor.detach().resolve_neg().contiguous()


def _address(tensor: Tensor, row: int) -> int:
    return tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size()


def _in_threads(work: Callable[[int, int], None], n_outputs: int) -> None:
    """Do work for all outputs, each thread for its share of them."""
    threads = torch.get_num_threads()
    if threads == 1:
        work(0, n_outputs)
        return
    bounds = [n_outputs * thread // threads for thread in range(threads + 1)]
    try:
        shares = [_pool(threads).submit(work, *share) for share in pairwise(bounds)]
    except RuntimeError:  # the interpreter ends, and this thread outlives its main one
        work(0, n_outputs)
        return
    for share in shares:
        share.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "int4")
