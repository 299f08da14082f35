"""A peer's identity: one Ed25519 key in one file, which is also its libp2p peer id.

The file is libp2p's own form of a private key (a two-field protobuf), so that p2pd reads the very same file.
"""

import hashlib
import os
import secrets
from functools import lru_cache
from pathlib import Path
from types import TracebackType

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm.errors import BadConfiguration, IdentityInUse
from swarm.permissions import is_open

SIGNATURE_BYTES = 64
_PRIVATE_PREFIX = b"\x08\x01\x12\x40"  # protobuf: key type Ed25519, 64 bytes: seed and public key
_PUBLIC_PREFIX = b"\x00\x24\x08\x01\x12\x20"  # multihash identity, 36 bytes: key type Ed25519, 32 bytes


class Identity:
    """An Ed25519 key pair that signs for one peer."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._seed = seed
        self.public_key = self._key.public_key().public_bytes_raw()
        self.peer_id = peer_id_of(self.public_key)

    @classmethod
    def generate(cls) -> "Identity":
        """Make a fresh identity that lives in memory only."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """Read the identity file, or make one (mode 0600) at first use. Raises BadConfiguration."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                cls.generate().save(path)
            data = path.read_bytes()
            if is_open(path.stat().st_mode):
                raise BadConfiguration(f"identity {path}", f"others can read it; run: chmod 600 {path}")
        except OSError as error:
            raise BadConfiguration(f"identity {path}", error.strerror or str(error)) from None
        if len(data) != 68 or not data.startswith(_PRIVATE_PREFIX):
            raise BadConfiguration(f"identity {path}", "not an Ed25519 key file; delete it to get a fresh identity")
        identity = cls(data[4:36])
        if identity.public_key != data[36:]:
            raise BadConfiguration(f"identity {path}", "the file is damaged; restore it or delete it")
        return identity

    def save(self, path: Path) -> None:
        """Write the key file in one step, readable by its owner alone; an existing file stays as it is."""
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_PRIVATE_PREFIX + self._seed + self.public_key)
            try:
                os.link(partial, path)
            except FileExistsError:
                return  # two processes made one at the same time: the first one's counts
        finally:
            partial.unlink()

    def sign(self, domain: bytes, message: bytes) -> bytes:
        """Sign `message` for one purpose. Returns 64 bytes."""
        return self._key.sign(_separated(domain, message))


class IdentityLock:
    """Holds an identity file for this process. Raises IdentityInUse when another process holds it."""

    def __init__(self, path: Path) -> None:
        import fcntl  # noqa: PLC0415 - not on Windows; servers and bootstrap nodes alone hold a file

        self._path = path.with_name(path.name + ".lock")
        self._file = self._path.open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise IdentityInUse(str(path)) from None

    def release(self) -> None:
        """Let another process have the identity."""
        self._file.close()

    def __enter__(self) -> "IdentityLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def verify(public_key: bytes, domain: bytes, message: bytes, signature: bytes) -> bool:
    """Whether `signature` over `message` for this purpose was made by the key. Never raises."""
    if len(public_key) != 32 or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _separated(domain, message))
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=4096)  # base58 costs more than all else that is done with a key, but signatures
def peer_id_of(public_key: bytes) -> str:
    """Return the libp2p peer id (base58, "12D3KooW...") of a 32-byte Ed25519 public key."""
    return base58.b58encode(_PUBLIC_PREFIX + public_key).decode()


@lru_cache(maxsize=4096)
def public_key_of(peer_id: str) -> bytes:
    """Return the 32-byte Ed25519 key inside a peer id. Raises ValueError for any other kind of peer id."""
    if len(peer_id) > 64:  # reading base58 takes the square of its length
        raise ValueError(f"{peer_id[:64]!r}... is too long for a peer id")
    data = base58.b58decode(peer_id)
    if len(data) != len(_PUBLIC_PREFIX) + 32 or not data.startswith(_PUBLIC_PREFIX):
        raise ValueError(f"{peer_id!r} is not the peer id of an Ed25519 key")
    return data[len(_PUBLIC_PREFIX) :]


def _separated(domain: bytes, message: bytes) -> bytes:
    """Signatures for one purpose never count for another: the domain is hashed in with its length."""
    return hashlib.sha256(len(domain).to_bytes(2, "big") + domain + message).digest()
