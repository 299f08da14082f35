"""The nodes that answered, remembered on disk: a swarm outlives the nodes that its members were first told of.

    memory = memory_of(network, access, public=public)
    config = NodeConfig(..., met=memory.addresses())
    async with open_node(config, clock=time.time) as node, remembering(node, memory): ...

Each network has a file of its own. A private swarm's is named by its key, so that networks of one name stay apart.
"""

import hashlib
import ipaddress
import json
import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import structlog

from swarm.access import Access
from swarm.identity import public_key_of
from swarm.limits import limit
from swarm.net.reach import makes_sense

_log = structlog.get_logger("swarm.dht")


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """How many nodes are remembered, and for how long."""

    peers_max: int = limit(24, "peers", "remembered; those that answered longest ago are forgotten")
    bytes_max: int = limit(64 << 10, "bytes", "of the file; a longer one is not read")
    age_max_s: float = limit(90 * 86400.0, "s", "without an answer; then a node is forgotten")
    first_s: float = limit(20.0, "s", "after joining, the neighbours are noted for the first time")
    every_s: float = limit(600.0, "s", "they are noted this often")


class PeerMemory:
    """One network's file. A file that is damaged or cannot be written counts as empty."""

    def __init__(self, path: Path, *, public: bool, limits: MemoryLimits = MemoryLimits()) -> None:
        """public: only addresses that make sense on the internet are kept."""
        self.path, self.limits, self._public = path, limits, public

    def addresses(self, now: float | None = None) -> tuple[str, ...]:
        """Return the multiaddrs of nodes that answered, the latest first. now: wall seconds."""
        return tuple(self._read(time.time() if now is None else now))

    def note(self, answered: Iterable[str], now: float | None = None) -> None:
        """Remember nodes that answer now, by their multiaddrs."""
        now = time.time() if now is None else now
        kept = dict.fromkeys((address for address in answered if self._usable(address)), now)
        known_peers = {address.rpartition("/")[2] for address in kept}
        for address, at in self._read(now).items():
            if address.rpartition("/")[2] not in known_peers:
                kept[address] = at
        self._write(dict(list(kept.items())[: self.limits.peers_max]))

    def _read(self, now: float) -> dict[str, float]:
        try:
            with self.path.open("rb") as file:
                data = file.read(self.limits.bytes_max + 1)
            found = json.loads(data) if len(data) <= self.limits.bytes_max else {}
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(found, dict):
            return {}
        fresh = {
            address: min(float(at), now)
            for address, at in found.items()
            if isinstance(at, int | float) and now - at < self.limits.age_max_s and self._usable(address)
        }
        latest_first = sorted(fresh, key=lambda address: -fresh[address])
        return {address: fresh[address] for address in latest_first[: self.limits.peers_max]}

    def _write(self, kept: dict[str, float]) -> None:
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial.write_text(json.dumps(kept, indent=1))
            partial.replace(self.path)
        except OSError as error:
            _log.debug("nodes are not remembered", path=str(self.path), why=error.strerror)
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def _usable(self, address: str) -> bool:
        form = r"/ip[46]/(?P<host>[0-9a-f.:]{2,45})/tcp/[0-9]{1,5}/p2p/(?P<peer>[A-Za-z0-9]{40,64})"
        found = re.fullmatch(form, address)
        if found is None:
            return False
        with suppress(ValueError):
            public_key_of(found["peer"])
            return makes_sense(str(ipaddress.ip_address(found["host"])), public=self._public)
        return False


def memory_of(network: str, access: Access, *, public: bool) -> PeerMemory:
    """Return the memory of a network, in the platform's folder for state."""
    name = network
    if access.network_key is not None:
        name += "-" + hashlib.sha256(access.network_key.derive("file of remembered peers")).hexdigest()[:16]
    return PeerMemory(Path(platformdirs.user_state_dir("swarm"), "peers", f"{name}.json"), public=public)
