"""What becomes of a checkpoint's tensors as they are read: quantised layers are unpacked one by one."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from swarm.model.formats import Packing
from swarm.model.reading import Held, MalformedWeights
from swarm.model.stored import Stored


class Keeping:
    """Makes of each weight the tensor that is kept. A subclass may round it."""

    def __init__(self, dtype: torch.dtype) -> None:
        """dtype: of unpacked weights."""
        self._dtype = dtype

    def plain(self, _name: str, tensor: Tensor) -> Tensor:
        """Return what is kept of a plain tensor. _name: the checkpoint's."""
        return tensor

    def stored(self, _name: str, weight: Stored) -> Tensor:
        """Return what is kept of a quantised weight. _name: that the checkpoint would have for a plain one.

        Raises MalformedWeights where it does not fit into the model.
        """
        return weight.dense(self._dtype)


class Unpacker:
    """Collects the parts of quantised weights, and unpacks a weight as soon as its last part is there."""

    def __init__(self, packing: Packing | None, keeping: Keeping, names: Iterable[str] | None) -> None:
        """packing: None for a checkpoint of plain weights. names: of all tensors; None: `lists` has them in time."""
        self._packing, self._keeping = packing, keeping
        self._lacking: defaultdict[str, set[str]] = defaultdict(set)
        self._parts: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        self._weights: dict[str, Tensor] = {}
        self._taken: set[str] = set()
        self._is_listed = names is not None
        self._list(names or ())

    def lists(self, names: Iterable[str]) -> None:
        """Take the names of all tensors of a file that is read next."""
        if not self._is_listed:
            self._list(names)

    def read(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor that is kept in its place. Raises MalformedWeights."""
        part = None if self._packing is None else self._packing.part_of(name, tensor.dtype)
        if self._packing is None or part is None:
            return self._keeping.plain(name, tensor)
        weight = self._packing.weight_of(name)
        if weight in self._weights or part in self._parts[weight]:
            raise MalformedWeights(f"{name[:200]} is there twice, or in no list of tensors")
        self._parts[weight][part] = tensor
        self._taken.add(name)
        if self._lacking[weight] <= self._parts[weight].keys():
            self._weights[weight] = self._unpack(weight)
        return tensor.new_empty(0)

    def finish(self, tensors: dict[str, Held]) -> dict[str, Held]:
        """Return all tensors, with weights in the place of their parts. Raises MalformedWeights."""
        for weight in self._parts:
            lacking = sorted(self._lacking[weight] - self._parts[weight].keys())
            raise MalformedWeights(f"{weight[:200]} is quantised, and has no {', '.join(lacking)[:200]} of its dtype")
        rest = {name: held for name, held in tensors.items() if name not in self._taken}
        return rest | {name: Held(weight) for name, weight in self._weights.items()}

    def _unpack(self, weight: str) -> Tensor:
        assert self._packing is not None
        parts = self._parts.pop(weight)
        try:
            return self._keeping.stored(weight, self._packing.read(parts))
        except MalformedWeights as error:
            raise MalformedWeights(f"{weight[:200]}: {error}") from None

    def _list(self, names: Iterable[str]) -> None:
        if self._packing is not None:
            for name in names:
                if (part := self._packing.part_of(name)) is not None:
                    self._lacking[self._packing.weight_of(name)].add(part)
