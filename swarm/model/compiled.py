"""Products compiled by LLVM (`llvmlite`), where that is installed, and the rounding of weights to integers.

Products with integers are those of `swarm.model.eightbits`, `.fourbits` and `.owncodes`, which compute the same bits by
torch's operations, many times as slowly. Products with halves are for processors that multiply float32 alone. The loops
come from `swarm.model.jit` and take plain addresses, so this module alone says which tensors fit together.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import structlog
import torch
from torch import Tensor

from swarm.model.halfcode import Half
from swarm.model.jit import Compiler, compiler
from swarm.model.llvmtext import Dtype
from swarm.model.vectorcode import Weights

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

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    def prepare(self, weights: Weights | Half) -> None:
        """Compile the products. Raises whatever LLVM does."""
        if weights == "bfloat16" or weights == "float16":  # noqa: PLR1714 - so that types are told apart
            self._compiler.halves(weights)
        else:
            self._compiler.loops(weights)

    def rounded(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Round a matrix to int8: [out, in], to integers and scales as `eightbits.rounded` has them."""
        weight = _readable(weight)
        round_ = self._compiler.rounding("int8", _dtype(weight)).round
        integers, scales = _new(torch.int8, *weight.shape), _new(torch.float32, len(weight))

        def work(start: int, stop: int) -> None:
            ours = [_address(each, start) for each in (weight, integers, scales)]
            round_(*ours, stop - start, weight.shape[1])

        _in_threads(work, len(weight))
        return integers, scales

    def sought(self, weight: Tensor, search: Search) -> tuple[Tensor, Tensor, Tensor]:
        """Round a matrix to int4: [out, in], to codes, numbers and scales as `fourbits.packed` has them."""
        weight = _readable(weight)
        round_ = self._compiler.rounding("int4", _dtype(weight), weighed=search.shares is not None).round
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
        """Multiply activations by weights: [positions, in] -> [positions, out] of the same dtype."""
        loops, given_dtype, rows = self._compiler.loops(matrix.weights), rows.dtype, _readable(rows)
        split, row_bytes = loops.split[_dtype(rows)], rows.shape[1] * rows.element_size()
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
                lengths = n_inputs, padded, 32 * chunk, tile, loops.octets[tile], 2 * positions
                split(rows.data_ptr() + first * row_bytes, *given, groups * tile, *lengths)
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
        if given_dtype is not torch.bfloat16:
            return output if given_dtype is torch.float32 else output.to(given_dtype)
        narrow = _new(torch.bfloat16, positions, n_outputs)
        loops.narrow(output.data_ptr(), narrow.data_ptr(), positions * n_outputs)
        return narrow

    def widened(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply activations by weights in half precision: [positions, in] and [out, in] -> float32 [positions, out].

        Inputs are a multiple of 8. Raises RuntimeError for others.
        """
        (positions, n_inputs), n_outputs = rows.shape, len(weight)
        if n_inputs % 8:
            raise RuntimeError(f"compiled products take multiples of 8 inputs, not {n_inputs}")
        halves = self._compiler.halves("bfloat16" if weight.dtype is torch.bfloat16 else "float16")
        rows, weight = _in_memory(rows.to(torch.float32)), _in_memory(weight)
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
    try:
        with _compiling:
            found = compiler()
            if found is None:
                return None
            compiled = CompiledKernels(found)
            compiled.prepare(weights)
    except Exception as error:  # noqa: BLE001 - a library that does not load or compile; torch computes the same bits
        _log.warning("no compiled products", weights=weights, why=str(error)[:200] or repr(error))
        return None
    return compiled


def _new(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return memory for compiled code, whatever torch's defaults are in this thread and in others."""
    return torch.empty(shape, dtype=dtype, device=_cpu)


def _dtype(tensor: Tensor) -> Dtype:
    """Return the dtype of a tensor that is `_readable`."""
    return "bfloat16" if tensor.dtype is torch.bfloat16 else "float32"


def _readable(tensor: Tensor) -> Tensor:
    """Return a tensor as compiled code reads it: float32 or bfloat16, in one piece. Raises as `_in_memory`."""
    if tensor.dtype not in (torch.float32, torch.bfloat16):
        tensor = tensor.to(torch.float32)
    return _in_memory(tensor)


def _in_memory(tensor: Tensor) -> Tensor:
    """Return a tensor in one piece. Raises NotImplementedError off the CPU."""
    if not tensor.is_cpu:
        raise NotImplementedError(f"compiled code takes tensors on the CPU, not on {tensor.device}")
    return tensor if tensor.is_contiguous() and not tensor.is_neg() else tensor.resolve_neg().contiguous()


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
