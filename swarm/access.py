"""Access to a private swarm: for peers that have its key, and for peers on a list.

The *network key* is 32 random bytes that all members share. It is never used itself: each purpose has a key derived
from it (HKDF-SHA256), so that the handshake's secret reveals nothing about the one that seals records.

The *list of allowed peers* names identities. It needs no secret, and it can tell members apart.
"""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from swarm.errors import BadConfiguration
from swarm.identity import public_key_of
from swarm.permissions import is_open

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class NetworkKey:
    """The secret that makes a swarm private."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        assert len(self.secret) == KEY_BYTES

    def derive(self, purpose: str) -> bytes:
        """Return the 32-byte key of one purpose."""
        return HKDF(SHA256(), KEY_BYTES, salt=None, info=f"swarm network key: {purpose}".encode()).derive(self.secret)

    @classmethod
    def load(cls, path: Path) -> "NetworkKey":
        """Read a key file: 64 hex digits, for its owner's eyes alone. Raises BadConfiguration."""
        setting = f"network key {path}"
        make_one = f"to make one: (umask 077; openssl rand -hex 32 > {path})"
        try:
            with path.open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                text = file.read(2 * KEY_BYTES + 3)
        except FileNotFoundError:
            raise BadConfiguration(setting, f"there is no such file; {make_one}") from None
        except OSError as error:
            raise BadConfiguration(setting, error.strerror or str(error)) from None
        if is_open(mode):
            raise BadConfiguration(setting, f"others can read it; run: chmod 600 {path}")
        try:
            secret = bytes.fromhex(text.decode().strip())
        except ValueError:
            secret = b""
        if len(secret) != KEY_BYTES:
            raise BadConfiguration(setting, f"it is not {2 * KEY_BYTES} hex digits; {make_one}")
        return cls(secret)


@dataclass(frozen=True, slots=True)
class Access:
    """The peers that may take part; by default all."""

    network_key: NetworkKey | None = None
    allowed: frozenset[str] | None = None  # peer ids; None: all

    def admits(self, peer: str) -> bool:
        """Whether this peer is on the list, or there is none."""
        return self.allowed is None or peer in self.allowed

    @classmethod
    def load(cls, network_key: Path | None, allow_peers: Path | None, own: str | None = None) -> "Access":
        """Read both files, where they are given. Raises BadConfiguration.

        own: this side's peer id. It has to be on the list, or no peer with the same list would take it in.
        """
        allowed = None if allow_peers is None else _read_list(allow_peers)
        if allow_peers is not None and allowed is not None and own is not None and own not in allowed:
            raise BadConfiguration(f"allowed peers {allow_peers}", f"this side's own id is not on the list; add {own}")
        return cls(None if network_key is None else NetworkKey.load(network_key), allowed)


EVERYBODY = Access()


def _read_list(path: Path) -> frozenset[str]:
    """Read peer ids, one in a line; text behind a # is for people."""
    setting, peers_max, bytes_max = f"allowed peers {path}", 4096, 1 << 20
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
        text = data.decode()
    except OSError as error:
        raise BadConfiguration(setting, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise BadConfiguration(setting, "it is no text in UTF-8") from None
    peers = set()
    for number, line in enumerate(text.splitlines(), 1):
        peer = line.partition("#")[0].strip()
        if not peer:
            continue
        try:
            public_key_of(peer)
        except ValueError:
            raise BadConfiguration(setting, f"line {number}: {peer[:64]!r} is no peer id such as 12D3KooW...") from None
        peers.add(peer)
    if len(peers) > peers_max or len(data) > bytes_max:
        raise BadConfiguration(setting, f"more than {peers_max} peers, or {bytes_max} bytes; make it shorter")
    return frozenset(peers)
