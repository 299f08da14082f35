"""Seals: in a private swarm, strangers see noise, in places that only members can compute.

A record's place in the DHT names the model, the owner and the blocks, so in a private swarm the place is as secret as
the record: the key's name has a secret in it, and the subkey is a MAC of the subkey.
"""

import hashlib
import hmac
import os
from enum import Enum
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from swarm.access import NetworkKey
from swarm.errors import RecordError

NONCE_BYTES = 12  # random: after 2^32 records under one key two could be the same, which takes 1,000 servers 2 years
SEAL_BYTES = NONCE_BYTES + 16  # the nonce before and the tag after


class Purpose(Enum):
    """The kind of data that is closed: data of one kind does not open as another."""

    RECORD = b"record"
    ANSWER = b"dial-back answer"


class Seal(Protocol):
    """Protects a swarm's data from nodes that are no members."""

    scope: str
    """The network in the names of DHT keys."""

    def close(self, data: bytes, purpose: Purpose = Purpose.RECORD) -> bytes:
        """Return the form of `data` that others may see."""
        ...

    def open(self, data: bytes, purpose: Purpose = Purpose.RECORD) -> bytes:
        """Invert `close`. Raises RecordError for data that no member closed for this purpose."""
        ...

    def subkey(self, text: str) -> str:
        """Return the form of a subkey that others may see."""
        ...


class OpenSeal:
    """A public swarm's: it hides nothing. Records are protected by their signatures alone."""

    def __init__(self, network: str) -> None:
        self.scope = network

    def close(self, data: bytes, purpose: Purpose = Purpose.RECORD) -> bytes:
        """Return it as it is."""
        del purpose
        return data

    def open(self, data: bytes, purpose: Purpose = Purpose.RECORD) -> bytes:
        """Return it as it is."""
        del purpose
        return data

    def subkey(self, text: str) -> str:
        """Return it as it is."""
        return text


class KeyedSeal:
    """A private swarm's: AES-256-GCM, with the purpose as associated data, and HMAC-SHA256 for places."""

    def __init__(self, key: NetworkKey, network: str) -> None:
        self.scope = key.derive(f"names of DHT keys of {network}").hex()
        self._aead = AESGCM(key.derive("records"))
        self._subkeys = key.derive("DHT subkeys")

    def close(self, data: bytes, purpose: Purpose = Purpose.RECORD) -> bytes:
        """Return nonce, ciphertext and tag."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, data, purpose.value)

    def open(self, data: bytes, purpose: Purpose = Purpose.RECORD) -> bytes:
        """Invert `close`. Raises RecordError."""
        try:
            return self._aead.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], purpose.value)
        except (InvalidTag, ValueError):  # ValueError: too short for a nonce
            raise RecordError("seal: not made with this swarm's network key") from None

    def subkey(self, text: str) -> str:
        """Return 40 hex digits."""
        return hmac.new(self._subkeys, text.encode(), hashlib.sha256).hexdigest()[:40]


def seal_for(network: str, key: NetworkKey | None) -> Seal:
    """Return the seal of a network."""
    return OpenSeal(network) if key is None else KeyedSeal(key, network)
