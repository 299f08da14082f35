"""A span's rounded weights between the model and the cache on disk: which tensors a block's file has, and how named."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarm.blocks import Blocks
from swarm.model.hollow import blocks_of
from swarm.model.integer import IntegerLimits, RoundedMatrix, matrices_in, matrices_of, nothing
from swarm.model.kinds import Form, kinds_in
from swarm.model.reading import MalformedWeights
from swarm.model.weightcache import CacheKey, WeightCache
from swarm.model.writing import Layout, Piece


@dataclass(frozen=True, slots=True)
class Part:
    """The tensors of one file, by their names in the model.

    plain: shapes of those that stay as they are. rounded: shapes of those that do not. matrices: what the latter
    become, one for each layer and expert.
    """

    plain: dict[str, tuple[int, ...]]
    rounded: dict[str, tuple[int, ...]]
    matrices: dict[str, Form]

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names of all tensors."""
        return (*self.plain, *self.rounded)


def parts_of(
    model: PreTrainedModel,
    blocks: Blocks,
    idle: tuple[str, ...],
    matrix: type[RoundedMatrix],
    limits: IntegerLimits = IntegerLimits(),  # noqa: B008 - frozen
) -> dict[str, Part]:
    """Return a hollow model's tensors by file: one for each block, and one for the rest. It may be on the meta device.

    idle: name prefixes of weights that no block needs. matrix: the kind that names the class.
    """
    layers = blocks_of(model)
    paths = {module: name for name, module in model.named_modules()}
    prefixes = {f"{paths[layers[index]]}.": f"block-{index:04d}" for index in blocks}
    found: dict[str, Part] = {part: Part({}, {}, {}) for part in prefixes.values()}
    rounded = set()
    for index in blocks:
        for module, kind in kinds_in(layers[index], matrix, limits).items():
            for name, size in matrices_of(module).items():
                rounded.add(f"{paths[module]}.{name.partition('.')[0]}")
                found[f"block-{index:04d}"].matrices[f"{paths[module]}.{name}"] = Form(kind, size)
    for name, tensor in model.state_dict().items():
        if not name.startswith(idle):
            part = next((part for prefix, part in prefixes.items() if name.startswith(prefix)), "rest")
            into = found.setdefault(part, Part({}, {}, {}))
            (into.rounded if name in rounded else into.plain)[name] = tuple(tensor.shape)
    return found


class Kept:
    """The rounded weights of one span that a cache has, and those that it is to get."""

    def __init__(self, cache: WeightCache, key: CacheKey, parts: dict[str, Part], dtype: torch.dtype) -> None:
        """dtype: in which the other weights are loaded."""
        self._cache, self._key, self._parts, self._dtype = cache, key, parts, dtype
        self._lacking: dict[str, Part] = {}
        self.is_complete = False  # whether the cache had everything

    def recall(self, stays: Callable[[str], bool]) -> tuple[dict[str, Tensor], dict[str, RoundedMatrix]]:
        """Return the tensors that the cache has, to be loaded by the model's names, and the matrices.

        stays: whether a name of the model stays the same where `transformers` loads it. A block of other names is
        rounded anew each time.
        """
        tensors: dict[str, Tensor] = {}
        read: list[_Reader] = []
        kept = {part: content for part, content in self._parts.items() if all(map(stays, content.names))}
        for part, content in kept.items():
            reader = _Reader(content)
            found = self._cache.load(self._key, part, reader.names, reader.keep)
            if found is None:
                self._lacking[part] = content
                continue
            read.append(reader)
            tensors |= {name: found[name] for name in content.plain}
            tensors |= {name: nothing(torch.Size(shape), self._dtype) for name, shape in content.rounded.items()}
        self.is_complete = len(kept) == len(self._parts) and not self._lacking
        # Not as they are read: kernels may be compiled meanwhile, which tell what a matrix is.
        return tensors, {name: matrix for reader in read for name, matrix in reader.matrices()}

    def remember(self, model: PreTrainedModel) -> None:
        """Give the cache the parts that it lacked. model: with its rounded weights, made of verified ones."""
        state = model.state_dict()
        matrices = matrices_in(model)
        for part, content in self._lacking.items():
            plain = [_plain(name, state[name]) for name in content.plain]
            self._cache.save(self._key, part, [*plain, *(_rounded(name, matrices[name]) for name in content.matrices)])


class _Reader:
    """Takes a file's tensors as they are read, and makes matrices of them."""

    def __init__(self, content: Part) -> None:
        self.names = content.plain.keys() | {
            each for name, form in content.matrices.items() for each in _layouts(name, form)
        }
        self._content = content
        self._parts: dict[str, Tensor] = {}

    def keep(self, name: str, tensor: Tensor) -> Tensor:
        """Take a tensor. Raises MalformedWeights."""
        if name in self._content.plain:
            if tuple(tensor.shape) != self._content.plain[name]:
                raise MalformedWeights(f"{name} has another shape")
            return tensor
        whole = name.rpartition(".")[0]
        form = self._content.matrices[whole]
        layouts = _layouts(whole, form)
        if layouts[name] != (tensor.dtype, tuple(tensor.shape)):
            raise MalformedWeights(f"{name} has another shape")
        self._parts[name] = tensor
        return tensor.new_empty(0)

    def matrices(self) -> Iterator[tuple[str, RoundedMatrix]]:
        """Make the matrices, once: the parts of each are let go of, so that they are not held twice."""
        for name, form in self._content.matrices.items():
            yield name, form.kind.restored(form.size, [self._parts.pop(each) for each in _layouts(name, form)])


def _layouts(name: str, form: Form) -> dict[str, Layout]:
    return {f"{name}.{part}": layout for part, layout in form.layouts.items()}


def _plain(name: str, tensor: Tensor) -> Piece:
    place = tensor.data_ptr() % 64 if tensor.device.type == "cpu" else 0
    return Piece({name: Layout(tensor.dtype, tuple(tensor.shape))}, lambda: (tensor,), place)


def _rounded(name: str, matrix: RoundedMatrix) -> Piece:
    form = Form(type(matrix), (matrix.n_outputs, matrix.n_inputs))
    return Piece(_layouts(name, form), lambda: matrix.parts)
