"""The store below a directory: its interface, and a form of it in memory.

`swarm.dht.node.SwarmNode` is the real one. `MemoryStore` behaves like a whole network of such nodes in one object: with
the same checks and the same bounds, for tests and simulators.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.access import EVERYBODY, Access
from swarm.dht.records import key_id
from swarm.dht.sampling import Sample, children, is_full
from swarm.dht.storage import RecordStorage
from swarm.dht.validator import Clock, Entry, OnEntries, RecordGate

FULL = -1  # nodes that took an entry, where most refused it


class RecordStore(Protocol):
    """Keeps signed records under keys, until they expire."""

    @property
    def gate(self) -> RecordGate:
        """The gate that accepts records or rejects them."""

    async def put(self, entries: Sequence[Entry]) -> tuple[int, ...]:
        """Store entries. Returns, for each, how many other nodes hold it now. Raises NetworkError.

        FULL instead: most of the nodes that are to hold it refuse it, so that it belongs under another key.
        """

    async def get(
        self, keys: Sequence[str], on_entries: OnEntries | None = None, sample: Sample | None = None
    ) -> dict[str, tuple[bytes, ...]]:
        """Return the newest living records under each key, as they are stored. Raises NetworkError.

        on_entries: may be called with records as they come, before the last node has answered.
        sample: no more than this is needed, and it may come from keys below full ones, too.
        """


@dataclass(frozen=True, slots=True)
class MemoryStore:
    """A RecordStore that is one object."""

    gate: RecordGate
    storage: RecordStorage

    @classmethod
    def make(cls, network: str, clock: Clock, access: Access = EVERYBODY) -> "MemoryStore":
        """Make an empty one."""
        return cls(RecordGate(network, clock, access), RecordStorage(clock))

    async def put(self, entries: Sequence[Entry]) -> tuple[int, ...]:
        """Store entries; 1 for each that was kept."""
        full = [self.storage.is_full(entry) for entry in entries]
        kept = [self.storage.put(entry) for entry in entries]
        return tuple(FULL if no_room and not ok else int(ok) for no_room, ok in zip(full, kept, strict=True))

    async def get(
        self, keys: Sequence[str], on_entries: OnEntries | None = None, sample: Sample | None = None
    ) -> dict[str, tuple[bytes, ...]]:
        """Return the living records under each key; for a sample, all below full ones too, whatever its bytes."""
        del on_entries
        found: dict[str, tuple[bytes, ...]] = {}
        level = list(keys)
        while level:
            found |= {key: tuple(entry.data for entry in self.storage.entries(key_id(key))) for key in level}
            level = [below for key in level if sample and is_full([len(found[key])]) for below in children(key)]
        return found
