"""From an opened checkpoint to a running span or the client's part: only the files and tensors that are needed."""

import contextlib
import logging
import sys
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from swarm.blocks import Blocks
from swarm.errors import ChecksumMismatch, UnsupportedArchitecture, UnsupportedCheckpoint
from swarm.model.aligned import align
from swarm.model.allocator import return_free_memory
from swarm.model.checkpoint import Checkpoint
from swarm.model.classes import numeric_class_of, quantisation_of
from swarm.model.hollow import (
    absent_prefixes,
    beyond_blocks,
    blocks_of,
    class_for,
    decoder_of,
    hollow_class,
    one_at_a_time,
    skeleton,
    text_config,
)
from swarm.model.kept import Kept, parts_of
from swarm.model.kernels import leave_out_planned_attention
from swarm.model.kinds import matrix_for
from swarm.model.probe import check_span, prove_direct_path, prove_packing
from swarm.model.quantising import Rounding, importance_for, prove_rounded, quantised_bytes, refuse_to_quantise
from swarm.model.reading import Held, MalformedWeights, read_tensors
from swarm.model.span import Span, SpanLimits
from swarm.model.stored import Stored
from swarm.model.texts import CONFIG_NAME
from swarm.model.unpacking import Keeping, Unpacker
from swarm.model.weightcache import CacheKey, WeightCache

Dtype = torch.dtype | str  # "auto": the checkpoint's


def load_span(
    checkpoint: Checkpoint,
    blocks: Blocks,
    *,
    dtype: Dtype = "auto",
    device: torch.device | str = "cpu",
    quantize: str | None = None,
    rounded: WeightCache | None = None,
    limits: SpanLimits = SpanLimits(),  # noqa: B008 - frozen
) -> Span:
    """Fetch, verify and load some blocks of a model.

    quantize: "int8" or "int4" gives linear layers such weights, where `quantisation_for` finds kernels for them.
    "int4-" with the digest of the checkpoint's importance rounds by it (`Importance.named`). "own4" keeps the codes of
    a checkpoint that is quantised in 4 bits.
    rounded: where such weights are kept for the next time, as soon as its `write` is called. Blocks that it has are
    neither fetched nor read again.
    Raises BadBlocks, ChecksumMismatch, DownloadFailed, UnsupportedCheckpoint, UnsupportedArchitecture; BadConfiguration
    for other weights.
    """
    checkpoint.check(blocks)
    leave_out_planned_attention(torch.device(device))
    rounding, names = None, _Names(checkpoint, blocks)
    if quantize is not None:
        hollow = names.hollow
        matrix = matrix_for(quantize)
        refuse_to_quantise(checkpoint, hollow, blocks, quantize)  # before anything is downloaded
        wanted, importance = expected_dtype(checkpoint, dtype), importance_for(checkpoint, quantize)
        kept = None
        if rounded is not None and matrix.rounds:
            rounded.tidy()
            key = CacheKey(checkpoint.root, str(numeric_class_of(checkpoint.config, wanted, quantize)))
            parts = parts_of(hollow, blocks, idle_prefixes(checkpoint, hollow), matrix)
            kept = Kept(rounded, key, parts, wanted)
        rounding = Rounding(hollow, blocks, wanted, matrix, kept, importance)
    model = _load(names, dtype, torch.device(device), rounding)
    span = Span.of(model, checkpoint.traits, blocks, limits)
    if rounding is not None:
        if not rounding.is_complete:  # else it was proved before the cache got it
            prove_rounded(checkpoint.model, span)
        align(span)
    check_span(span)
    prove_direct_path(span)
    prove_packing(span)
    if rounding is not None:
        rounding.remember(span.model)
    return span


def fetch_span(checkpoint: Checkpoint, blocks: Blocks) -> None:
    """Download and verify the files of these blocks, and load nothing. Raises as `load_span` does."""
    checkpoint.check(blocks)
    files = _files(checkpoint, needed_tensors(checkpoint, blocks))
    for name, path in checkpoint.source.fetch(files).items():
        with _discarding(checkpoint, name):
            checkpoint.manifest.verify(path, name)


def block_bytes(checkpoint: Checkpoint, dtype: Dtype = "auto", quantize: str | None = None) -> int:
    """Return the bytes of the largest block's weights, from their shapes alone: nothing is downloaded for it.

    quantize: as of `load_span`. Where a checkpoint is quantised itself, its files tell what a block takes on average.
    """
    if quantize is None and quantisation_of(checkpoint.config) is not None:
        files = checkpoint.source.size(checkpoint.weight_files)
        return max(0, files - ends_bytes(checkpoint, dtype)) // checkpoint.n_blocks
    item = expected_dtype(checkpoint, dtype).itemsize
    layers = blocks_of(skeleton(class_for(checkpoint.config), checkpoint.config))
    group_size = None if checkpoint.packing is None else checkpoint.packing.group_size
    if quantize is not None:
        return max(quantised_bytes(layer, item, quantize, group_size) for layer in layers)
    return max(sum(weight.numel() for weight in (*layer.parameters(), *layer.buffers())) for layer in layers) * item


def ends_bytes(checkpoint: Checkpoint, dtype: Dtype = "auto") -> int:
    """Return the bytes of the client's part, from its shapes alone: nothing is downloaded for it."""
    hollow = skeleton(hollow_class(checkpoint.config, None), checkpoint.config)
    weights = (*hollow.parameters(), *hollow.buffers())
    return sum(weight.numel() for weight in weights) * expected_dtype(checkpoint, dtype).itemsize


def ends_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the files that `load_ends` needs."""
    return (CONFIG_NAME, *_files(checkpoint, needed_tensors(checkpoint, None)))


def expected_dtype(checkpoint: Checkpoint, dtype: Dtype = "auto") -> torch.dtype:
    """Return the dtype in which a span will compute: the one that is asked for, or the one that the config declares."""
    named = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)  # torch has no "auto"
    if isinstance(named, torch.dtype):
        return named
    declared = getattr(checkpoint.config, "dtype", None) or getattr(text_config(checkpoint.config), "dtype", None)
    return declared if isinstance(declared, torch.dtype) else torch.float32


def load_ends(checkpoint: Checkpoint, *, dtype: Dtype = "auto", device: torch.device | str = "cpu") -> PreTrainedModel:
    """Fetch, verify and load the client's part: embeddings, final norm and head; every block is a placeholder.

    Put something in the place of the blocks with `swarm.model.ends.replace_blocks`. Raises as `load_span` does.
    """
    ends: Any = _load(_Names(checkpoint, None), dtype, torch.device(device))
    ends.name_or_path = ends.config.name_or_path = checkpoint.model  # it was loaded from memory
    if ends.can_generate():
        ends.generation_config = checkpoint.texts().generation_config()
    loaded: PreTrainedModel = ends
    return loaded


def _load(names: "_Names", dtype: Dtype, device: torch.device, rounding: Rounding | None = None) -> PreTrainedModel:
    checkpoint, blocks, cls = names.checkpoint, names.blocks, type(names.hollow)
    dtype = expected_dtype(checkpoint, dtype)  # as it is announced, before any file is read
    keeping = _Rounded(names, rounding, dtype)
    # Never in inference_mode, even if the caller is: weights that are inference tensors compute in another order.
    with quiet(), torch.inference_mode(mode=False):
        recalled = {} if rounding is None else rounding.recall(names.stays)
        tensors = {name: Held(tensor) for name, tensor in recalled.items()}
        if rounding is None or not rounding.is_complete:
            tensors |= read_verified(checkpoint, lambda name: names.needed(name, recalled), keeping)
        try:
            with one_at_a_time():
                loaded: Any = cls.from_pretrained(
                    None, config=checkpoint.config, dtype=dtype, state_dict=tensors, output_loading_info=True
                )
        except (RuntimeError, ValueError, KeyError, OSError, ImportError) as error:
            raise UnsupportedCheckpoint(checkpoint.model, f"it does not load: {error}") from error
    model, report = loaded
    idle = idle_prefixes(checkpoint, model) if blocks is not None else ()
    missing = sorted(key for key in report["missing_keys"] if not key.startswith(idle))
    missing += sorted(str(item) for item in report["mismatched_keys"])
    if missing:
        raise UnsupportedCheckpoint(checkpoint.model, f"{len(missing)} tensors are missing or misshapen: {missing[0]}")
    if rounding is not None:
        rounding.finish(model, device)
    with torch.inference_mode(mode=False):
        # Parameters keep requires_grad, although nothing is trained: torch.matmul computes in another order without it.
        on_device: PreTrainedModel = model.to(device).eval()
    return_free_memory()
    return on_device


def read_verified(
    checkpoint: Checkpoint,
    needs: Callable[[str], bool],
    keeping: Keeping,
) -> dict[str, Held]:
    """Read the files with these tensors once, verified as they are read. Returns the tensors, unpacked.

    keeping: makes of a tensor the one that is kept, once it has been read, and before its file is known to be right.
    Raises ChecksumMismatch, DownloadFailed, UnsupportedCheckpoint or UnsupportedArchitecture.
    """
    listed = None if checkpoint.index is None else checkpoint.index.weight_map
    unpacker = Unpacker(checkpoint.packing, keeping, listed)
    tensors: dict[str, Held] = {}
    for name, path in checkpoint.source.fetch(_files(checkpoint, needs)).items():
        with _discarding(checkpoint, name):
            try:
                digest = checkpoint.manifest.files[name]
                found = read_tensors(path, digest, needs, unpacker.read, lists=unpacker.lists)
            except MalformedWeights as error:
                raise UnsupportedCheckpoint(checkpoint.model, f"{name} does not load: {error}") from error
        tensors |= {key: Held(tensor) for key, tensor in found.items()}
    try:
        return unpacker.finish(tensors)
    except (MalformedWeights, ArithmeticError, TypeError, LookupError, RuntimeError) as error:
        raise UnsupportedCheckpoint(checkpoint.model, f"it does not load: {error}") from error


@contextlib.contextmanager
def _discarding(checkpoint: Checkpoint, name: str) -> Iterator[None]:
    """Forget our copy of a file that turns out to be damaged."""
    try:
        yield
    except ChecksumMismatch:
        checkpoint.source.discard(name)
        raise


def needed_tensors(checkpoint: Checkpoint, blocks: Blocks | None) -> Callable[[str], bool]:
    """Return what tells by the checkpoint's name of a tensor whether a hollow model needs it."""
    return _Names(checkpoint, blocks).needed


class _Names:
    """The checkpoint's names of tensors, and a hollow model's. hollow: that model, on the meta device."""

    def __init__(self, checkpoint: Checkpoint, blocks: Blocks | None) -> None:
        hollow = skeleton(hollow_class(checkpoint.config, blocks), checkpoint.config)
        self.checkpoint, self.blocks, self.hollow = checkpoint, blocks, hollow
        self._full = skeleton(class_for(checkpoint.config), checkpoint.config).state_dict()
        self._absent = absent_prefixes(hollow)
        if blocks is not None:
            self._absent += idle_prefixes(checkpoint, hollow)
        transforms = get_model_conversion_mapping(hollow)
        self._renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
        self._converters = [item for item in transforms if isinstance(item, WeightConverter)]
        self._beyond = beyond_blocks(checkpoint.config)
        self._packing = checkpoint.packing

    def needed(self, name: str, there: Container[str] = ()) -> bool:
        """Whether the model needs the tensor. there: names of the model that have their tensors already.

        By exclusion, so that all tensors of a hosted block stay in, such as a quantisation's scales.
        """
        if self._beyond is not None and self._beyond.search(name):
            return False
        target, _ = self._target(name if self._packing is None else self._packing.weight_of(name))
        return target not in there and not target.startswith(self._absent)

    def alone(self, name: str) -> str | None:
        """The model's name of a tensor that becomes one there as it is; None: it is joined with others, or split."""
        target, converter = self._target(name)
        return target if converter is None else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the model's weight of this name; () where it has none."""
        return tuple(self._full[name].shape) if name in self._full else ()

    def stays(self, name: str) -> bool:
        """Whether a tensor that has the model's own name already keeps it while it is loaded."""
        return self._target(name) == (name, None)

    def _target(self, name: str) -> tuple[str, str | None]:
        prefix = self.hollow.base_model_prefix
        target, converter = rename_source_key(name, self._renamings, self._converters, prefix, self._full)
        return (name, None) if target not in self._full and name in self._full else (target, converter)


class _Rounded(Keeping):
    """Lets a span's weights be rounded as they are read."""

    def __init__(self, names: _Names, rounding: Rounding | None, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._names, self._rounding = names, rounding

    def plain(self, name: str, tensor: Tensor) -> Tensor:
        """Return what is kept of a plain tensor."""
        return tensor if self._rounding is None else self._rounding.read(self._names.alone(name), tensor)

    def stored(self, name: str, weight: Stored) -> Tensor:
        """Return what is kept of a quantised weight."""
        alone = self._names.alone(name)
        wanted = weight.shape if alone is None else self._names.shape(alone)
        if wanted != weight.shape:
            raise MalformedWeights(f"it is {list(weight.shape)}, and the model's is {list(wanted)}")
        if self._rounding is None or alone is None or not self._rounding.takes(alone):
            return super().stored(name, weight)
        return self._rounding.read_stored(alone, weight)


def _files(checkpoint: Checkpoint, needs: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the names of the files that have a hollow model's tensors. Raises UnsupportedArchitecture."""
    if checkpoint.index is None:
        return checkpoint.weight_files
    files = {file for name, file in checkpoint.index.weight_map.items() if needs(name)}
    if not files:
        raise UnsupportedArchitecture(
            checkpoint.traits.model_type, "no tensor of the checkpoint belongs to these blocks"
        )
    return tuple(sorted(files))


def idle_prefixes(checkpoint: Checkpoint, model: PreTrainedModel) -> tuple[str, ...]:
    """Return the name prefixes of the decoder's own weights that a span can do without, such as the final norm's."""
    decoder, _ = decoder_of(model)
    path = next(name for name, module in model.named_modules() if module is decoder)
    return tuple(f"{path}.{name}." if path else f"{name}." for name in checkpoint.traits.idle)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Unexpected keys are the point here: keep the report about them off the terminal, and bars out of logs."""
    level, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.ERROR)
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()
