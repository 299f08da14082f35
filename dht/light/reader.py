"""A light store that outlives py-libp2p: where that has ended, the next look-up joins again."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import structlog

from swarm.access import EVERYBODY, Access
from swarm.dht.light.store import LightStore, open_light
from swarm.dht.sampling import Sample
from swarm.dht.validator import Clock, Entry, OnEntries, RecordGate

_log = structlog.get_logger("swarm.light")


@asynccontextmanager
async def open_reader(
    network: str, initial_peers: Sequence[str], clock: Clock, access: Access = EVERYBODY
) -> "AsyncIterator[LightReader]":
    """Join as a reader while the block runs. Raises Unreachable, ClockSkew, BadConfiguration."""
    reader = LightReader(network, initial_peers, clock, access)
    try:
        await reader.join()
        yield reader
    finally:
        await reader.close()


class LightReader:
    """A RecordStore that only reads. Lives in the asyncio loop. Made by `open_reader`."""

    def __init__(self, network: str, initial_peers: Sequence[str], clock: Clock, access: Access) -> None:
        self.restarts = -1  # of py-libp2p; 0 once it runs
        self._joining = network, tuple(initial_peers), clock, access
        self._gate = RecordGate(network, clock, access)
        self._store: LightStore | None = None
        self._stack = AsyncExitStack()  # ends the store
        self._lock = asyncio.Lock()

    @property
    def gate(self) -> RecordGate:
        """The gate that accepts records or rejects them."""
        return self._store.gate if self._store is not None else self._gate

    async def join(self) -> LightStore:
        """Return a store whose py-libp2p runs: the present one, or a new one. Raises as `open_light` does."""
        async with self._lock:
            if self._store is None or not self._store.alive:
                if self._store is not None:
                    _log.warning("py-libp2p has ended and is started again")
                await self._stack.aclose()
                self._store = await self._stack.enter_async_context(open_light(*self._joining))
                self.restarts += 1
            return self._store

    async def put(self, entries: Sequence[Entry]) -> tuple[int, ...]:
        """Refuse: a reader announces nothing."""
        raise NotImplementedError("a light reader only reads")

    async def get(
        self, keys: Sequence[str], on_entries: OnEntries | None = None, sample: Sample | None = None
    ) -> dict[str, tuple[bytes, ...]]:
        """Search the DHT. Returns the newest living records under each key. Raises NetworkError."""
        store = await self.join()
        return await store.get(keys, on_entries, sample)

    async def close(self) -> None:
        """Leave."""
        async with self._lock:
            await self._stack.aclose()
