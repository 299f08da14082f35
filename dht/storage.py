"""The records that this node keeps for others: bounded everywhere, and nobody can spoil what somebody else stored.

It replaces hivemind's TimedStorage, which a stranger can make forget (a rejected store shortens a key's life),
overwrite (a plain value replaces a dictionary) and grow without end (rejected stores stay in its heap).

When it is full, what is already there stays and newcomers are refused: honest servers refresh every 20 s and keep their
places, and a flood of fresh identities finds none.
"""

from swarm.dht.validator import Clock, Entry

SUBKEYS_MAX = 256  # entries of one key
OWNED_MAX = 8  # entries of one key that one owner may hold: its spans that begin within 8 blocks
BYTES_MAX = 48 << 20  # with what the gate remembers, 64 MiB
ENTRY_OVERHEAD_BYTES = 1536  # the Python objects around one record, which may be alone under its key
SWEEP_S = 5.0  # how often expired entries are looked for everywhere


class RecordStorage:
    """Entries by key and subkey, until they expire."""

    def __init__(self, clock: Clock, *, bytes_max: int = BYTES_MAX) -> None:
        self._clock = clock
        self._bytes_max = bytes_max
        self._keys: dict[bytes, dict[str, Entry]] = {}
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
            self.bytes -= _size(known)
        self._keys.setdefault(key, held)[subkey] = entry
        self.bytes += _size(entry)
        return True

    def entries(self, key: bytes) -> tuple[Entry, ...]:
        """Return the living entries of a key."""
        return tuple(self._alive(key).values())

    def __len__(self) -> int:
        return sum(len(held) for held in self._keys.values())

    def _is_full(self, held: dict[str, Entry], entry: Entry) -> bool:
        owned = sum(other.facts.owner == entry.facts.owner for other in held.values())
        return len(held) >= SUBKEYS_MAX or owned >= OWNED_MAX or self.bytes + _size(entry) > self._bytes_max

    def _alive(self, key: bytes) -> dict[str, Entry]:
        """Drop what has expired under one key and return the rest."""
        held = self._keys.get(key)
        if held is None:
            return {}
        now = self._clock()
        for subkey in [subkey for subkey, entry in held.items() if entry.facts.expires <= now]:
            self.bytes -= _size(held.pop(subkey))
        if not held:
            del self._keys[key]
        return held

    def _sweep(self) -> None:
        now = self._clock()
        if 0 <= now - self._swept < SWEEP_S:
            return
        self._swept = now
        for key in list(self._keys):
            self._alive(key)


def _size(entry: Entry) -> int:
    return len(entry.data) + ENTRY_OVERHEAD_BYTES
