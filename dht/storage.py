"""The records that this node keeps for others: bounded everywhere, and no peer can spoil the record of another.

It replaces hivemind's TimedStorage, which a stranger can make forget (a rejected store shortens a key's life),
overwrite (a plain value replaces a dictionary) and grow without end (rejected stores stay in its heap).

A full storage keeps its records and refuses newcomers: honest servers refresh every 20 s and keep their places, and a
flood of fresh identities finds none.
"""

from dataclasses import dataclass

from swarm.dht.records import RECORD
from swarm.dht.validator import Clock, Entry
from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """How much a node keeps for others."""

    entries_per_key: int = limit(RECORD.held_per_key, "entries", "a newcomer is refused when a key has so many")
    owned_max: int = limit(8, "entries", "of one owner under one key: its spans of one model; more go to keys below")
    bytes_max: int = limit(48 << 20, "bytes", "a newcomer is refused; 64 MiB with the digests that the gate remembers")
    entry_overhead_bytes: int = limit(1536, "bytes", "charged for the Python objects around one record")
    sweep_s: float = limit(5.0, "s", "expired entries of all keys are dropped this often")


class RecordStorage:
    """Entries by key and subkey, until they expire."""

    def __init__(self, clock: Clock, limits: StorageLimits = StorageLimits()) -> None:
        self._clock = clock
        self._limits = limits
        self._keys: dict[bytes, dict[str, Entry]] = {}
        self._models: dict[bytes, set[bytes]] = {}  # a model's first key -> those of its keys that have entries
        self._swept = clock()
        self.bytes = 0

    def put(self, entry: Entry) -> bool:
        """Keep an entry that the gate admitted. True if it is now the one in its place, False if it was refused.

        An older or equal record never shortens, replaces or deletes a newer one.
        """
        self._sweep()
        key, subkey = entry.place.key, entry.place.subkey
        held = self._alive(key)
        known = held.get(subkey)
        if known is not None:
            if known.data == entry.data:
                return True
            if known.place.rank >= entry.place.rank:
                return False
        elif self._is_full(held, entry):
            return False
        if known is not None:
            self.bytes -= self._size(known)
        self._keys.setdefault(key, held)[subkey] = entry
        if key != entry.facts.model.key:
            self._models.setdefault(entry.facts.span.key, set()).add(key)
        self.bytes += self._size(entry)
        return True

    def entries(self, key: bytes) -> tuple[Entry, ...]:
        """Return the living entries of a key."""
        return tuple(self._alive(key).values())

    def of_model(self, key: bytes) -> tuple[Entry, ...]:
        """Return the living entries of a model, under all of its keys that this node keeps. key: the model's first."""
        return tuple(entry for below in tuple(self._models.get(key, ())) for entry in self.entries(below))

    def is_full(self, entry: Entry) -> bool:
        """Return whether there is no room for an entry that would be new."""
        held = self._alive(entry.place.key)
        return entry.place.subkey not in held and self._is_full(held, entry)

    def __len__(self) -> int:
        return sum(len(held) for held in self._keys.values())

    def _is_full(self, held: dict[str, Entry], entry: Entry) -> bool:
        owned = sum(other.facts.owner == entry.facts.owner for other in held.values())
        limits = self._limits
        full = self.bytes + self._size(entry) > limits.bytes_max
        return full or len(held) >= limits.entries_per_key or owned >= limits.owned_max

    def _alive(self, key: bytes) -> dict[str, Entry]:
        """Drop the expired entries of one key and return the others."""
        held = self._keys.get(key)
        if held is None:
            return {}
        now = self._clock()
        for entry in [entry for entry in held.values() if entry.facts.expires <= now]:
            self.bytes -= self._size(held.pop(entry.place.subkey))
            if not held:
                del self._keys[key]
                self._drop(entry.facts.span.key, key)
        return held

    def _drop(self, model: bytes, key: bytes) -> None:
        """Forget that a model has entries under a key."""
        if key in (keys := self._models.get(model, set())):
            keys.remove(key)
            if not keys:
                del self._models[model]

    def _sweep(self) -> None:
        now = self._clock()
        if 0 <= now - self._swept < self._limits.sweep_s:
            return
        self._swept = now
        for key in list(self._keys):
            self._alive(key)

    def _size(self, entry: Entry) -> int:
        return len(entry.data) + self._limits.entry_overhead_bytes
