"""Names of sessions that show whose they are.

Every hop of a route learns the session's name, and could take it at other servers, where the owner would find it taken
in a repair. So a name has a part that follows from its owner's identity, and gives way to nobody else.
"""

import hashlib
import secrets

NONCE_BYTES = PROOF_BYTES = 8


def new_name(peer: str) -> str:
    """Return a name for a session of `peer`'s, 32 hex digits, which nobody can guess."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return (nonce + _proof(peer, nonce)).hex()


def is_name_of(peer: str, name: str) -> bool:
    """Whether a session's name shows that it is this peer's. Another identity with the same proof takes 2^64 tries."""
    raw = bytes.fromhex(name)
    return raw[NONCE_BYTES:] == _proof(peer, raw[:NONCE_BYTES])


def _proof(peer: str, nonce: bytes) -> bytes:
    return hashlib.sha256(b"swarm session\0" + nonce + peer.encode()).digest()[:PROOF_BYTES]
