"""From an opened checkpoint to a running span or the client's part: only the files and tensors that are needed."""

import contextlib
import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from swarm.blocks import Blocks
from swarm.errors import ChecksumMismatch, UnsupportedArchitecture, UnsupportedCheckpoint
from swarm.model.allocator import return_free_memory
from swarm.model.checkpoint import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, Checkpoint
from swarm.model.hollow import absent_prefixes, blocks_of, class_for, decoder_of, hollow_class, skeleton, text_config
from swarm.model.kernels import leave_out_planned_attention
from swarm.model.ownership import own_weights
from swarm.model.probe import check_span, prove_direct_path, prove_packing
from swarm.model.span import Span, SpanLimits

Dtype = torch.dtype | str  # "auto": the checkpoint's


def load_span(
    checkpoint: Checkpoint,
    blocks: Blocks,
    *,
    dtype: Dtype = "auto",
    device: torch.device | str = "cpu",
    limits: SpanLimits = SpanLimits(),  # noqa: B008 - frozen
) -> Span:
    """Fetch, verify and load some blocks of a model.

    Raises BadBlocks, ChecksumMismatch, DownloadFailed, UnsupportedCheckpoint, UnsupportedArchitecture.
    """
    checkpoint.check(blocks)
    leave_out_planned_attention(torch.device(device))
    model = _load(checkpoint, blocks, dtype, torch.device(device))
    span = Span.of(model, checkpoint.traits, blocks, limits)
    check_span(span)
    prove_direct_path(span)
    prove_packing(span)
    return span


def fetch_span(checkpoint: Checkpoint, blocks: Blocks) -> None:
    """Download and verify the files of these blocks, and load nothing. Raises as `load_span` does."""
    checkpoint.check(blocks)
    _fetch(checkpoint, hollow_class(checkpoint.config, blocks), blocks)


def block_bytes(checkpoint: Checkpoint, dtype: Dtype = "auto") -> int:
    """Return the bytes of the largest block's weights, from their shapes alone: nothing is downloaded for it.

    Quantised weights count as if they were not quantised.
    """
    item = expected_dtype(checkpoint, dtype).itemsize
    layers = blocks_of(skeleton(class_for(checkpoint.config), checkpoint.config))
    return max(sum(weight.numel() for weight in (*layer.parameters(), *layer.buffers())) for layer in layers) * item


def ends_bytes(checkpoint: Checkpoint, dtype: Dtype = "auto") -> int:
    """Return the bytes of the client's part, from its shapes alone: nothing is downloaded for it."""
    hollow = skeleton(hollow_class(checkpoint.config, None), checkpoint.config)
    weights = (*hollow.parameters(), *hollow.buffers())
    return sum(weight.numel() for weight in weights) * expected_dtype(checkpoint, dtype).itemsize


def ends_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the files that `load_ends` needs."""
    names = needed_tensors(checkpoint, hollow_class(checkpoint.config, None), None)
    return (CONFIG_NAME, *_files_with(checkpoint, names))


def expected_dtype(checkpoint: Checkpoint, dtype: Dtype = "auto") -> torch.dtype:
    """Return the dtype in which a span will compute: the one that is asked for, or the one that the config declares."""
    if isinstance(dtype, torch.dtype):
        return dtype
    declared = getattr(checkpoint.config, "dtype", None) or getattr(text_config(checkpoint.config), "dtype", None)
    return declared if isinstance(declared, torch.dtype) else torch.float32


def load_ends(checkpoint: Checkpoint, *, dtype: Dtype = "auto", device: torch.device | str = "cpu") -> PreTrainedModel:
    """Fetch, verify and load the client's part: embeddings, final norm and head; every block is a placeholder.

    Put something in the place of the blocks with `swarm.model.ends.replace_blocks`. Raises as `load_span` does.
    """
    ends = _load(checkpoint, None, dtype, torch.device(device))
    ends.name_or_path = ends.config.name_or_path = checkpoint.model  # it was loaded from a directory of links
    return ends


def _load(checkpoint: Checkpoint, blocks: Blocks | None, dtype: Dtype, device: torch.device) -> PreTrainedModel:
    cls = hollow_class(checkpoint.config, blocks)
    names, paths = _fetch(checkpoint, cls, blocks)
    if blocks is None:
        # Taken along for the client where it exists; not part of the manifest.
        optional = tuple(name for name in ("generation_config.json",) if name in checkpoint.source.names())
        paths |= checkpoint.source.fetch(optional)
    # Never in inference_mode, even if the caller is: weights that are inference tensors compute in another order.
    with staged(checkpoint, paths, names) as directory, quiet(), torch.inference_mode(mode=False):
        try:
            loaded: Any = cls.from_pretrained(
                directory, config=checkpoint.config, dtype=dtype, use_safetensors=True, output_loading_info=True
            )
        except (SafetensorError, RuntimeError, ValueError, KeyError, OSError, ImportError) as error:
            raise UnsupportedCheckpoint(checkpoint.model, f"it does not load: {error}") from error
    model, report = loaded
    idle = idle_prefixes(checkpoint, model) if blocks is not None else ()
    missing = sorted(key for key in report["missing_keys"] if not key.startswith(idle))
    missing += sorted(str(item) for item in report["mismatched_keys"])
    if missing:
        raise UnsupportedCheckpoint(checkpoint.model, f"{len(missing)} tensors are missing or misshapen: {missing[0]}")
    with torch.inference_mode(mode=False):
        own_weights(model, {str(path.resolve()) for path in paths.values()})
        # Parameters keep requires_grad, although nothing is trained: torch.matmul computes in another order without it.
        on_device: PreTrainedModel = model.to(device).eval()
    return_free_memory()
    return on_device


def _fetch(
    checkpoint: Checkpoint, cls: type[PreTrainedModel], blocks: Blocks | None
) -> tuple[set[str] | None, dict[str, Path]]:
    """Make the files that a hollow model needs local, and verify them. Returns its tensors' names and the files."""
    names = needed_tensors(checkpoint, cls, blocks)
    return names, fetched(checkpoint, names)


def fetched(checkpoint: Checkpoint, names: set[str] | None) -> dict[str, Path]:
    """Make the config and the files with these tensors local, and verify them. names: None for the only file.

    Raises ChecksumMismatch or DownloadFailed.
    """
    files = _files_with(checkpoint, names)
    paths = checkpoint.source.fetch((CONFIG_NAME, *files))
    for name in files:
        try:
            checkpoint.manifest.verify(paths[name], name)
        except ChecksumMismatch:
            checkpoint.source.discard(name)
            raise
    return paths


def needed_tensors(checkpoint: Checkpoint, cls: type[PreTrainedModel], blocks: Blocks | None) -> set[str] | None:
    """Return the checkpoint's names of the tensors that a hollow model needs; None: there is but one file.

    By exclusion, so that all tensors of a hosted block stay in, such as a quantisation's scales.
    """
    if checkpoint.index is None:
        return None
    hollow = skeleton(cls, checkpoint.config)
    full = skeleton(class_for(checkpoint.config), checkpoint.config).state_dict()
    absent = absent_prefixes(hollow)
    if blocks is not None:
        absent += idle_prefixes(checkpoint, hollow)
    transforms = get_model_conversion_mapping(hollow)
    renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
    converters = [item for item in transforms if isinstance(item, WeightConverter)]
    needed = set()
    for name in checkpoint.index.weight_map:
        target, _ = rename_source_key(name, renamings, converters, hollow.base_model_prefix, full)
        if target not in full and name in full:
            target = name
        if not target.startswith(absent):
            needed.add(name)
    if not needed:
        raise UnsupportedArchitecture(
            checkpoint.traits.model_type, "no tensor of the checkpoint belongs to these blocks"
        )
    return needed


def idle_prefixes(checkpoint: Checkpoint, model: PreTrainedModel) -> tuple[str, ...]:
    """Return the name prefixes of the decoder's own weights that a span can do without, such as the final norm's."""
    decoder, _ = decoder_of(model)
    path = next(name for name, module in model.named_modules() if module is decoder)
    return tuple(f"{path}.{name}." if path else f"{name}." for name in checkpoint.traits.idle)


def _files_with(checkpoint: Checkpoint, names: set[str] | None) -> tuple[str, ...]:
    if checkpoint.index is None or names is None:
        return (SINGLE_NAME,)
    return tuple(sorted({checkpoint.index.weight_map[name] for name in names}))


@contextlib.contextmanager
def staged(checkpoint: Checkpoint, paths: dict[str, Path], names: set[str] | None) -> Iterator[Path]:
    """A directory as `from_pretrained` wants it: links to the files, and an index that knows of nothing else."""
    with tempfile.TemporaryDirectory(prefix="swarm-load-") as text:
        directory = Path(text)
        for name, path in paths.items():
            (directory / name).symlink_to(path.resolve())
        if checkpoint.index is not None and names is not None:
            (directory / INDEX_NAME).write_bytes(checkpoint.index.only(names))
        yield directory


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
