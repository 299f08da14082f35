"""Whether a libp2p node listens at an address, and which one: its own handshake proves its peer id.

Two servers of one home have one public address, where the router forwards the port to one of them. So an answer alone
tells nothing about the other. The probe makes the first half of libp2p's Noise handshake (libp2p/specs, noise/README)
and leaves: the second message carries the listener's identity. p2pd cannot be asked instead, because it takes an open
connection to the same peer for a new one.
"""

import re
import socket
from asyncio import get_running_loop

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from noise.connection import Keypair, NoiseConnection
from noise.exceptions import NoiseHandshakeError, NoiseInvalidMessage, NoiseValueError

from swarm.errors import HandshakeFailed
from swarm.identity import peer_id_of
from swarm.net.address import Tcp
from swarm.net.noise import ChannelKey


async def peer_at(at: Tcp) -> str:
    """Return the peer id of the libp2p node that listens at a literal address. The caller limits the time.

    Raises HandshakeFailed where none listens, OSError where nothing does.
    """
    loop, first = get_running_loop(), FirstHalf(str(at))
    with socket.socket(socket.AF_INET6 if ":" in at.host else socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, (at.host, at.port))
        greeting = b"\x13/multistream/1.0.0\n\x07/noise\n"  # from either side, if the listener speaks both
        await loop.sock_sendall(sock, greeting + _sized(first.message))
        hello = await _read(sock, len(greeting))
        if hello != greeting:
            raise HandshakeFailed(str(at), "it is no libp2p node, or does not speak Noise")
        length = int.from_bytes(await _read(sock, 2), "big")
        if length > 1024:  # a node with an Ed25519 identity and no extensions writes 202
            raise HandshakeFailed(str(at), f"a message of {length} bytes")
        return first.read(await _read(sock, length))


class FirstHalf:
    """The initiator's half of one handshake, up to the second message."""

    def __init__(self, name: str) -> None:
        """name: of the listener, for errors."""
        self._name = name
        self._noise = NoiseConnection.from_name(b"Noise_XX_25519_ChaChaPoly_SHA256")
        self._noise.set_as_initiator()
        self._noise.set_keypair_from_private_bytes(Keypair.STATIC, ChannelKey().private)
        self._noise.start_handshake()
        self.message = bytes(self._noise.write_message())

    def read(self, second: bytes) -> str:
        """Return the peer id that the listener has proven. Raises HandshakeFailed."""
        try:
            payload = bytes(self._noise.read_message(second))
        except (InvalidTag, NoiseHandshakeError, NoiseInvalidMessage, NoiseValueError, ValueError) as error:
            raise HandshakeFailed(self._name, f"its Noise message is damaged: {error}") from None
        static = bytes(self._noise.noise_protocol.handshake_state.rs.public_bytes)
        if (peer := peer_in(payload, static)) is None:
            raise HandshakeFailed(self._name, "it does not prove an Ed25519 identity")
        return peer


def peer_in(payload: bytes, static: bytes) -> str | None:
    """Return the peer id that signed for the Noise key `static`, 32 bytes; None if none did."""
    # As protobuf writes both fields.
    found = re.match(rb"\x0a\x24\x08\x01\x12\x20(.{32})\x12\x40(.{64})", payload, re.DOTALL)
    try:
        if found is None:
            return None
        Ed25519PublicKey.from_public_bytes(found[1]).verify(found[2], b"noise-libp2p-static-key:" + static)
    except (InvalidSignature, ValueError):
        return None
    return peer_id_of(found[1])


def _sized(message: bytes) -> bytes:
    return len(message).to_bytes(2, "big") + message


async def _read(sock: socket.socket, count: int) -> bytes:
    """Read so many bytes. Raises HandshakeFailed at an end before."""
    data = b""
    while len(data) < count:
        part = await get_running_loop().sock_recv(sock, count - len(data))
        if not part:
            raise HandshakeFailed("a listener", "it ended the connection")
        data += part
    return data
