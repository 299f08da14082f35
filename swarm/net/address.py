"""Where a peer can be reached, as a value. Records carry it as text; a dialler parses it first."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Tcp:
    """A host (a name, or a literal without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ViaAnchor:
    """An anchor at which a hidden peer is moored: its peer id, its channel key, and where it is dialled."""

    peer: str
    channel_key: bytes
    at: Tcp

    def __str__(self) -> str:
        return f"{self.at} (anchor {self.peer[-8:]})"


Address: TypeAlias = Tcp | ViaAnchor


def parse(text: str) -> Tcp:
    """Read "host:port", "1.2.3.4:port" or "[::1]:port". Raises ValueError."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or not host or (":" in host) != bracketed or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{text[:128]!r} is not host:port")
    if not 0 < int(port[:6]) <= 65535 or len(port) > 5:
        raise ValueError(f"{port[:16]} is no port")
    return Tcp(host, int(port))


def dialable(texts: Iterable[str]) -> tuple[Tcp, ...]:
    """Return the addresses that can be dialled, in their order. Texts that are no address are left out."""
    found = []
    for text in texts:
        try:
            found.append(parse(text))
        except ValueError:
            continue
    return tuple(found)
