"""Weights that become int8 or int4 as a span is loaded (`swarm.model.integer`, `swarm.model.fourbits`)."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm.blocks import Blocks
from swarm.errors import BadConfiguration, UnsupportedCheckpoint
from swarm.model.allocator import return_free_memory
from swarm.model.checkpoint import Checkpoint
from swarm.model.compiled import prepare_kernels
from swarm.model.eightbits import IntegerMatrix, is_supported
from swarm.model.fourbits import FourBitMatrix
from swarm.model.hollow import blocks_of, class_for, skeleton
from swarm.model.importance import IMPORTANCE_NAME, Importance
from swarm.model.integer import (
    IntegerLimits,
    RoundedMatrix,
    integers_of,
    matrices_of,
    nothing,
    place,
    rounded_of,
    to_integers,
    weights_of,
)
from swarm.model.jit import is_installed
from swarm.model.kept import Kept
from swarm.model.kinds import kinds_in, matrix_for
from swarm.model.owncodes import OwnMatrix, fits
from swarm.model.probe import outputs_of, samples_of
from swarm.model.span import Span
from swarm.model.steady import make_steady, place_steady
from swarm.model.stored import Stored


@dataclass(frozen=True, slots=True)
class Quantisation:
    """weights: what they become, "int8" or "int4"; None: they stay as the checkpoint has them. why: for people."""

    weights: str | None
    why: str


def quantisation_for(wanted: str, checkpoint: Checkpoint, device: torch.device) -> Quantisation:
    """Return what a span's weights become.

    wanted: "none", "int8", "int4", or "auto": the checkpoint's own codes of 4 bits where it has some, else int8 where
    device and family can have it, and never fewer bits. The same for all blocks of a checkpoint, so that the numeric
    class is. Raises BadConfiguration where the device cannot have what is wanted; `load_span` raises where the family
    cannot.
    """
    if wanted not in ("none", "int8", "int4", "auto"):
        raise BadConfiguration("quantize", f"{wanted!r} is none of none, int8, int4 and auto")
    if wanted == "none":
        return Quantisation(None, "as they are in the checkpoint")
    weights = "int8" if wanted == "auto" else wanted
    if wanted == "auto" and device.type == "cpu" and _may_be(checkpoint, OwnMatrix.weights) is None:
        return Quantisation(OwnMatrix.weights, "the checkpoint's own 4 bits, without loss")
    if wanted == "auto" and device.type != "cpu":
        return Quantisation(None, f"{device} computes fastest so; --quantize int8 needs half of the memory")
    if why := _lacks_kernels(weights, device):
        if wanted == "auto":
            return Quantisation(None, why)
        raise BadConfiguration(f"quantize {wanted}", f"{why}: leave it out")
    if wanted == "auto" and (why := _may_be(checkpoint, weights)):
        return Quantisation(None, why)
    size, times = ("a quarter of bfloat16's memory, and less exact", "several times the speed")
    if weights == "int8":
        size, times = ("half of bfloat16's memory, and as exact", "a quicker start")
    elif (importance := checkpoint.importance()) is not None:
        weights = importance.named(weights)
        size += f", by the checkpoint's {IMPORTANCE_NAME}"
    slow = "" if device.type != "cpu" or is_installed() else f"; pip install 'swarm-inference[integers]' for {times}"
    return Quantisation(weights, size + slow)


def importance_for(checkpoint: Checkpoint, weights: str) -> Importance | None:
    """Return what weights of this name are rounded by; None: by nothing. Raises what `Checkpoint.importance` does.

    UnsupportedCheckpoint also where the checkpoint has another file than the one that the name has the digest of.
    """
    kind, _, digest = weights.partition("-")
    if not digest:
        return None
    found = checkpoint.importance()
    if found is None or found.named(kind) != weights:
        has = "it has no such file" if found is None else f"its own makes {found.named(kind)}"
        raise UnsupportedCheckpoint(checkpoint.model, f"{weights} is of another {IMPORTANCE_NAME}: {has}")
    return found


def _may_be(checkpoint: Checkpoint, weights: str) -> str | None:
    """Return why a checkpoint's blocks cannot have such weights; None: they can."""
    try:
        hollow = skeleton(class_for(checkpoint.config), checkpoint.config)
        refuse_to_quantise(checkpoint, hollow, Blocks(0, checkpoint.n_blocks), weights)
    except UnsupportedCheckpoint as error:
        return error.why
    return None


def _lacks_kernels(weights: str, device: torch.device) -> str | None:
    """Return why a device cannot have such weights; None: it can."""
    if device.type == "cpu":
        supported = weights == "int4" or is_supported()
        return (
            None
            if supported
            else f"{device} has no kernels for {weights} here, which take an x86 processor or the package llvmlite"
        )
    if device.type != "cuda" or find_spec("triton") is None:
        return f"{device} has no kernels for {weights} here, which take a GPU with CUDA and the package triton"
    try:
        try_kernels(weights, device)
    except Exception as error:  # noqa: BLE001 - compilers and drivers raise all kinds
        said = (str(error).strip() or repr(error)).splitlines()[0][:200]
        return f"{device} cannot run kernels for {weights} ({said}), which take a C compiler and Python's headers"
    return None


def try_kernels(weights: str, device: torch.device) -> None:
    """Multiply once on a GPU. Triton compiles for it, and raises whatever is missing for that."""
    moved = on_device(device)(matrix_for(weights).of(torch.ones(32, 64)))
    moved.multiply(torch.ones(1, 64, device=device))


def on_device(device: torch.device) -> Callable[[RoundedMatrix], RoundedMatrix]:
    """Return what moves a matrix to a GPU."""
    from swarm.model.ongpu import GpuFourBitMatrix, GpuIntegerMatrix  # noqa: PLC0415 - Triton is where CUDA is

    kinds = {IntegerMatrix.weights: GpuIntegerMatrix, FourBitMatrix.weights: GpuFourBitMatrix}

    def moved(matrix: RoundedMatrix) -> RoundedMatrix:
        return kinds[matrix.weights].of_host(matrix, device)

    return moved


class Rounding:
    """Rounds the weights of some blocks of one model: linear layers' as they are read, experts' once they are loaded.

    So linear layers never take the memory that they have in the checkpoint. Experts come in many tensors, which
    `transformers` joins.
    """

    def __init__(
        self,
        skeleton: PreTrainedModel,
        blocks: Blocks,
        dtype: torch.dtype,
        matrix: type[RoundedMatrix],
        kept: Kept | None = None,
        importance: Importance | None = None,
        limits: IntegerLimits = IntegerLimits(),  # noqa: B008 - frozen
    ) -> None:
        """skeleton: the hollow model, on the meta device. dtype: in which it is loaded.

        matrix: the kind that names the class. kept: by a cache on disk. importance: of inputs, which int4 regards.
        """
        self._limits, self._dtype, self._blocks, self._matrix, self._kept = limits, dtype, blocks, matrix, kept
        self._importance = importance
        kinds = self._kinds(skeleton)
        self._linears = {
            f"{name}.weight": kinds[module]
            for name, module in skeleton.named_modules()
            if module in kinds and isinstance(module, nn.Linear)
        }
        self._read: dict[str, RoundedMatrix] = {}
        self._beside = ThreadPoolExecutor(1, "round")  # while the next tensor is read
        self._coming: tuple[str, Future[RoundedMatrix]] | None = None

    def recall(self, stays: Callable[[str], bool]) -> dict[str, Tensor]:
        """Return the tensors that a cache has, by the model's names; their matrices are taken. stays: see `Kept`."""
        prepare_kernels(dict.fromkeys(kind.weights for kind in self._linears.values()))
        if self._kept is None:
            return {}
        tensors, self._read = self._kept.recall(stays)
        return tensors

    @property
    def is_complete(self) -> bool:
        """Whether the cache had all weights, so that no file of the checkpoint is read."""
        return self._kept is not None and self._kept.is_complete

    def takes(self, name: str) -> bool:
        """Whether a weight of the model is rounded as it is read."""
        return name in self._linears

    def read(self, name: str | None, tensor: Tensor) -> Tensor:
        """Return the tensor that is loaded in its place. name: in the model, where it becomes one tensor there."""
        if name not in self._linears or tensor.dim() != 2 or not tensor.is_floating_point():
            return tensor
        if not self._matrix.rounds:
            return tensor
        self._settle()  # or more than two tensors would be in memory
        self._coming = name, self._beside.submit(self._rounded, self._linears[name], name, tensor)
        return nothing(tensor.shape, self._dtype)

    def read_stored(self, name: str, weight: Stored) -> Tensor:
        """Do the same with a weight as a quantised checkpoint stores it. It is rounded from float32, once."""
        if self._matrix.rounds:
            return self.read(name, weight.dense(torch.float32))
        taken = OwnMatrix.taken(weight)
        if taken is None:
            return weight.dense(self._dtype)
        self._read[name] = taken
        return nothing(torch.Size(weight.shape), self._dtype)

    def finish(self, model: PreTrainedModel, device: torch.device) -> None:
        """Round the other weights: experts, and linear layers that are joined from several tensors.

        All integers move to the device then. Small layers keep theirs, and multiply in integers all the same.
        """
        self._settle()
        self._beside.shutdown()
        paths = {module: name for name, module in model.named_modules()}
        for module, kind in self._kinds(model).items():
            names = [f"{paths[module]}.{name}" for name in matrices_of(module)]
            there = [self._read.pop(name) for name in names if name in self._read]
            if not there and self._matrix.rounds and isinstance(module, nn.Linear):
                there = [self._rounded(kind, names[0], module.weight)]
            if there or self._matrix.rounds:
                to_integers(module, kind, there)
        if self._importance is not None:
            vars(model)["rounded_by"] = self._importance.named(self._matrix.weights)
        for index in self._blocks:
            make_steady(blocks_of(model)[index])
        if device.type != "cpu":
            place(model, device, on_device(device))
            place_steady(model, device)
        return_free_memory()

    def remember(self, model: PreTrainedModel) -> None:
        """Give the cache the parts that it lacked, once the model is known to be right. It writes them later."""
        if self._kept is not None:
            self._kept.remember(model)

    def _settle(self) -> None:
        """Wait for the matrix that is being rounded."""
        if self._coming is not None:
            name, coming = self._coming
            self._coming = None
            self._read[name] = coming.result()

    def _rounded(self, kind: type[RoundedMatrix], name: str, weight: Tensor) -> RoundedMatrix:
        """Round a linear layer's weight. Raises UnsupportedCheckpoint where the importance is of other inputs."""
        if self._importance is None or kind is not FourBitMatrix:
            return kind.of(weight)
        return FourBitMatrix.of(weight, self._importance.of(name, weight.shape[1]))

    def _kinds(self, model: PreTrainedModel) -> dict[nn.Module, type[RoundedMatrix]]:
        layers, found = blocks_of(model), dict[nn.Module, type[RoundedMatrix]]()
        for index in self._blocks:
            found |= kinds_in(layers[index], self._matrix, self._limits)
        return found


def prove_rounded(name: str, span: Span) -> None:
    """Run a few blocks. Raises UnsupportedCheckpoint where one goes around the layers that were rounded."""
    if integers_of(span.model) is None:
        raise UnsupportedCheckpoint(name, "no layer's codes could be taken as they are: pass --quantize none")
    for index in samples_of(span):
        with torch.inference_mode():
            outputs = outputs_of(span.part(Blocks(index, index + 1)))
        if not all(bool(output.isfinite().all()) for output in outputs):
            weights = integers_of(span.model)
            why = f"block {index} reads weights that {weights} has taken: pass --quantize none"
            raise UnsupportedCheckpoint(name, why)


def refuse_to_quantise(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    blocks: Blocks,
    weights: str,
    limits: IntegerLimits = IntegerLimits(),  # noqa: B008 - frozen
) -> None:
    """Raise UnsupportedCheckpoint where such weights, as "int8", are not for this model.

    It may be on the meta device.
    """
    name, packing = checkpoint.model, checkpoint.packing
    if getattr(model.config, "quantization_config", None) is not None:
        raise UnsupportedCheckpoint(name, "its weights are quantised already: pass --quantize none")
    layers = blocks_of(model)
    if weights == OwnMatrix.weights:
        if packing is None or packing.group_size is None or not fits(packing.group_size):
            raise UnsupportedCheckpoint(name, "it has no codes of 4 bits: pass --quantize none, int8 or int4")
        if not all(isinstance(each, nn.Linear) for index in blocks for each in rounded_of(layers[index], limits)):
            raise UnsupportedCheckpoint(name, "its experts are joined as they are loaded: pass --quantize int8")
    for index in blocks:
        share = _numbers(layers[index], limits) / _size(layers[index])
        if share < limits.share_min:
            why = f"{weights} is for linear layers and experts: {share:.0%} of block {index} is; pass --quantize none"
            raise UnsupportedCheckpoint(name, why)


def quantised_bytes(layer: nn.Module, item: int, quantize: str, group_size: int | None = None) -> int:
    """Return the memory of a block's weights once they are rounded. item: bytes of a number that is not.

    quantize: as "int8". group_size: of "own4".
    """
    matrix, numbers, integers = matrix_for(quantize), 0, 0
    for module, kind in kinds_in(layer, matrix).items():
        size_of = kind.bytes_of
        if group_size and not matrix.rounds:
            size_of = partial(OwnMatrix.bytes_of, group_size=group_size)
        for weight in weights_of(module):
            numbers += weight.numel()
            integers += size_of(weight.shape[:-1].numel(), weight.shape[-1])
    return (_size(layer) - numbers) * item + integers


def _numbers(layer: nn.Module, limits: IntegerLimits) -> int:
    return sum(weight.numel() for module in rounded_of(layer, limits) for weight in weights_of(module))


def _size(layer: nn.Module) -> int:
    return sum(tensor.numel() for tensor in (*layer.parameters(), *layer.buffers()))
