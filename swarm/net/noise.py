"""The handshake: Noise IK over X25519, AES-256-GCM and SHA-256, by the `noiseprotocol` library.

In a private swarm it is IKpsk1: the network's secret is mixed in at the end of the first message, whose tag only a
member can make. So a stranger is turned away before the responder has sent a byte (docs/adr).

The initiator knows the responder's channel key from its signed announcement. No application data travels in the
handshake's messages: the first one could be replayed. When it is over, its split keys seal our own frames
(`swarm.net.channel`), since a Noise transport message stops at 65,535 bytes.
"""

import hashlib
import hmac
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from noise.connection import Keypair, NoiseConnection
from noise.exceptions import NoiseHandshakeError, NoiseInvalidMessage, NoiseValueError

from swarm.config import PROTOCOL_VERSION
from swarm.errors import HandshakeFailed

MESSAGE_1_BYTES = 96  # e 32, s 32 + 16, empty payload 16
MESSAGE_2_BYTES = 48  # e 32, empty payload 16


class ChannelKey:
    """An X25519 key pair that answers handshakes. Made afresh by every process; its announcement vouches for it."""

    def __init__(self, private: bytes | None = None) -> None:
        key = X25519PrivateKey.generate() if private is None else X25519PrivateKey.from_private_bytes(private)
        self.private = key.private_bytes_raw()
        self.public = key.public_key().public_bytes_raw()


@dataclass(frozen=True, slots=True)
class ChannelSecrets:
    """The secrets of a finished handshake: one AES-256 key per direction, and a hash that is unique to this channel."""

    send_key: bytes
    receive_key: bytes
    handshake_hash: bytes

    def exporter(self, *, initiator: bool) -> bytes:
        """Return a secret of both ends, 32 bytes, from which no key of the frames can be told.

        initiator: whether this end is.
        """
        keys = (self.send_key, self.receive_key) if initiator else (self.receive_key, self.send_key)
        return hmac.digest(b"".join(keys), b"swarm channel exporter" + self.handshake_hash, hashlib.sha256)


class Handshake:
    """One side of one handshake."""

    def __init__(
        self,
        key: ChannelKey,
        prologue: bytes,
        remote_public: bytes | None,
        *,
        psk: bytes | None = None,
        ephemeral: bytes | None = None,
    ) -> None:
        """remote_public: the responder's 32-byte channel key makes this side the initiator; None the responder.

        psk: 32 bytes that both sides of a private swarm have. ephemeral: for published test vectors alone.
        """
        pattern = b"IK" if psk is None else b"IKpsk1"  # messages have the same sizes
        self._noise = NoiseConnection.from_name(b"Noise_%b_25519_AESGCM_SHA256" % pattern)
        if psk is not None:
            self._noise.set_psks(psk)
        self._noise.set_prologue(prologue)
        self._noise.set_keypair_from_private_bytes(Keypair.STATIC, key.private)
        if ephemeral is not None:
            self._noise.set_keypair_from_private_bytes(Keypair.EPHEMERAL, ephemeral)
        if remote_public is None:
            self._noise.set_as_responder()
        else:
            self._noise.set_as_initiator()
            self._noise.set_keypair_from_public_bytes(Keypair.REMOTE_STATIC, remote_public)
        self._noise.start_handshake()

    def write(self, payload: bytes = b"") -> bytes:
        """Return the next message to send. Raises HandshakeFailed for a remote key that no secret comes of."""
        try:
            return bytes(self._noise.write_message(payload))
        except ValueError as error:
            raise HandshakeFailed("the other side", "its channel key is no usable point of the curve") from error

    def read(self, message: bytes) -> bytes:
        """Take the other side's message; returns its payload. Raises HandshakeFailed."""
        try:
            return bytes(self._noise.read_message(message))
        except (InvalidTag, NoiseHandshakeError, NoiseInvalidMessage, NoiseValueError, ValueError) as error:
            why = "another channel key, another network or network key, or a damaged message"
            raise HandshakeFailed("the other side", why) from error

    @property
    def remote_public(self) -> bytes:
        """The other side's channel key, 32 bytes. For a responder only between the two messages."""
        return bytes(self._noise.noise_protocol.handshake_state.rs.public_bytes)

    def finish(self) -> ChannelSecrets:
        """Return the secrets. Only after both messages have passed."""
        assert self._noise.handshake_finished
        protocol = self._noise.noise_protocol
        return ChannelSecrets(
            send_key=bytes(protocol.cipher_state_encrypt.k),
            receive_key=bytes(protocol.cipher_state_decrypt.k),
            handshake_hash=bytes(self._noise.get_handshake_hash()),
        )


def prologue(network: str) -> bytes:
    """Return the bytes that both sides must agree on before all others: protocol and network."""
    return b"swarm/%d/%s" % (PROTOCOL_VERSION, network.encode())
