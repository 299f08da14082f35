"""Compiles loops for this processor with LLVM (`llvmlite`), each once in a process, and loads them.

The loops are those of `swarm.model.vectorcode`, `.halfcode` and `.roundingcode`. They take plain addresses: which
tensors fit together `swarm.model.compiled` says.
"""

import ctypes
import importlib
import mmap
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, get_args

from swarm.model.halfcode import Half, half_code, outputs_of
from swarm.model.integer import IntegerFormat
from swarm.model.llvmtext import Dtype
from swarm.model.roundingcode import int4_code, int8_code
from swarm.model.vectorcode import Kind, Weights, code_of, octets_of


@dataclass(frozen=True, slots=True)
class Loops:
    """Loops of `swarm.model.vectorcode`. multiply, octets: by the number of positions. engine: owns their code."""

    split: Mapping[Dtype, Callable[..., None]]
    multiply: Mapping[int, Callable[..., None]]
    octets: Mapping[int, int]
    narrow: Callable[..., None]
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


class Compiler:
    """Compiles loops for one processor, each once.

    processor: which instructions to use, and LLVM's names of the processor and of its features.
    """

    def __init__(self, llvm: Any, processor: tuple[Kind, str, str]) -> None:  # noqa: ANN401 - a module without types
        self._llvm = llvm
        self._kind, *self._target = processor
        self.loops, self.halves, self.rounding = cache(self._loops), cache(self._halves), cache(self._rounding)

    def _loops(self, weights: Weights) -> Loops:
        """Compile the products with one kind of integers."""
        engine = self._engine(code_of(weights, self._kind))
        split = {dtype: _function(engine, f"split_{dtype}", 4, 7) for dtype in get_args(Dtype)}
        octets = octets_of(weights, self._kind)
        multiply = {tile: _function(engine, f"multiply_{tile}", 8, 7) for tile in octets}
        return Loops(split, multiply, octets, _function(engine, "narrow", 2, 1), engine)

    def _halves(self, dtype: Half) -> Halves:
        """Compile the products with halves. Raises RuntimeError where a processor cannot widen and add in one step."""
        if self._kind == "ssse3":
            raise RuntimeError("this processor has no fused products")
        engine = self._engine(half_code(dtype))
        return Halves({tile: _function(engine, f"multiply_{tile}", 3, 4) for tile in outputs_of()}, engine)

    def _rounding(self, weights: Weights, dtype: Dtype, *, weighed: bool = False) -> Rounding:
        """Compile the rounding to int8 or int4 of weights of a dtype. weighed: int4's errors count by their inputs."""
        steps, least = IntegerFormat.weight_steps, IntegerFormat.least
        if weights == "int4":
            engine = self._engine(int4_code(dtype, steps, least, weighed=weighed))
            return Rounding(_function(engine, "round", 9, 3), engine)
        engine = self._engine(int8_code(dtype, steps, least))
        return Rounding(_function(engine, "round", 3, 2), engine)

    def _engine(self, code: str) -> Any:  # noqa: ANN401 - as above
        """Compile a module. Returns the engine that has it."""
        llvm, (name, features) = self._llvm, self._target
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


def _function(engine: Any, name: str, addresses: int, counts: int) -> Callable[..., None]:  # noqa: ANN401 - as above
    """Return a function of a module by its name, and by how many addresses and then numbers of 64 bits it takes."""
    types = [ctypes.c_void_p] * addresses + [ctypes.c_int64] * counts
    return ctypes.CFUNCTYPE(None, *types)(engine.get_function_address(name))


@cache
def compiler() -> Compiler | None:
    """Return the compiler for this processor. None: there is no `llvmlite`, or nothing may or can run here."""
    if not is_installed() or not _may_make_code():
        return None
    llvm = importlib.import_module("llvmlite.binding")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    processor = _processor(llvm)
    return None if processor is None else Compiler(llvm, processor)


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


def _may_make_code() -> bool:
    """Whether this process may run memory that it has written: systemd and SELinux can forbid it, and LLVM crashes."""
    if sys.platform != "linux":
        return True
    space = mmap.mmap(-1, mmap.PAGESIZE)
    place = ctypes.c_char.from_buffer(space)
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return int(protect(ctypes.addressof(place), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC)) == 0
