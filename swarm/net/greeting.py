"""The greeting, sans-IO: a peer's first bytes in, its proven identity out.

    preface, handshake message    each side once, in the clear; the initiator begins
    Hello                         each side once, its first sealed frame: it binds the Ed25519 identity to the channel

A responder with a list of allowed peers sends its Hello last, so it does not tell its identity to other peers.
"""

from dataclasses import dataclass, field

from swarm.config import PROTOCOL_VERSION
from swarm.errors import HandshakeFailed, ProtocolMismatch
from swarm.identity import peer_id_of, verify
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.frames import FrameReader, Sealer
from swarm.net.noise import MESSAGE_1_BYTES, MESSAGE_2_BYTES, ChannelSecrets, Handshake, prologue
from swarm.protocol.codec import decode, encode
from swarm.protocol.messages import Hello
from swarm.version import __version__

MAGIC = b"swarm"
PREFACE = MAGIC + bytes([PROTOCOL_VERSION])
HELLO_DOMAIN = {True: b"swarm channel initiator", False: b"swarm channel responder"}


@dataclass(frozen=True, slots=True)
class Proven:
    """A peer that has proven its identity."""

    peer: str
    process_key: bytes  # the public channel key: each process of a peer makes one
    software: str
    bundles: bool = False  # whether it takes several steps in one frame
    loads: bool = False  # whether it knows the question for an anchor's load
    moves: bool = False  # whether its channels may change their carriers
    skips: bool = False  # whether it takes steps without activations
    receipts: bool = False  # whether it knows the question for a receipt
    exporter: bytes = field(default=b"", repr=False)  # a secret of both ends of the channel


class Greeting:
    """One side's greeting of one channel."""

    def __init__(self, me: Endpoint, remote: Remote | None, frames: FrameReader) -> None:
        """remote: the peer to reach, which makes this side the initiator; None answers any peer.

        frames: the peer's bytes, of which the greeting takes its own.
        """
        self.me, self.remote = me, remote
        self.sealer: Sealer | None = None  # of this side's frames, once both handshake messages have passed
        self.done = False
        self._frames = frames
        self._outgoing = b""
        self._handshake: Handshake | None = None
        self._secrets: ChannelSecrets | None = None
        self._process_key = remote.channel_key if remote is not None else b""

    def take_outgoing(self) -> bytes:
        """Return the bytes to send now. Asked after each step, also after one that has failed."""
        outgoing, self._outgoing = self._outgoing, b""
        return outgoing

    def advance(self) -> Proven | None:
        """Go on with the bytes that are there, at first with none: the initiator begins.

        Returns the peer once it is proven, None while bytes are missing. Raises HandshakeFailed, ProtocolMismatch,
        FrameRejected and InvalidMessage, each of which ends the channel.
        """
        if self._secrets is None and not self._shake_hands():
            return None
        hello = self._frames.next()
        return None if hello is None else self._meet(hello)

    def shaken(self, secrets: ChannelSecrets) -> None:
        """Go on behind a handshake that has left these secrets."""
        self._handshake, self._secrets = None, secrets
        self.sealer = Sealer(secrets.send_key)
        self._frames.open_with(Sealer(secrets.receive_key))
        if self.remote is not None or self.me.access.allowed is None:
            self._introduce()  # else not before the peer is known to be on the list

    def _shake_hands(self) -> bool:
        """Take the other side's preface and handshake message. Returns whether they were there."""
        if self._handshake is None:
            self._handshake = self._begin()
        size = len(PREFACE) + (MESSAGE_2_BYTES if self.remote is not None else MESSAGE_1_BYTES)
        data = self._frames.clear(size)
        if not data.startswith(MAGIC[: len(data)]):
            raise HandshakeFailed(self._frames.peer, "it does not speak the swarm's protocol")
        if len(data) >= len(PREFACE) and (theirs := data[len(MAGIC)]) != PROTOCOL_VERSION:
            if self.remote is None and self.me.psk is None:  # a private swarm tells a stranger nothing
                self._outgoing = PREFACE  # so that the other side can say who must upgrade
            raise ProtocolMismatch(self._frames.peer, theirs, PROTOCOL_VERSION)
        if len(data) < size:
            return False
        self._handshake.read(data[len(PREFACE) :])
        self._frames.skip(size)
        if self.remote is None:
            self._process_key = self._handshake.remote_public
            self._outgoing += PREFACE + self._handshake.write()
        self.shaken(self._handshake.finish())
        return True

    def _begin(self) -> Handshake:
        me, remote = self.me, self.remote
        handshake = Handshake(
            me.key, prologue(me.network), remote.channel_key if remote is not None else None, psk=me.psk
        )
        if remote is not None:
            self._refuse_unlisted(remote.peer)
            self._outgoing = PREFACE + handshake.write()
        return handshake

    def _introduce(self) -> None:
        assert self.sealer is not None
        assert self._secrets is not None
        identity = self.me.identity
        signature = identity.sign(HELLO_DOMAIN[self.remote is not None], self._secrets.handshake_hash)
        key = identity.public_key.hex()
        hello = Hello(
            public_key=key,
            signature=signature.hex(),
            software=__version__,
            bundles=True,
            loads=True,
            moves=True,
            skips=True,
            receipts=True,
        )
        self._outgoing += self.sealer.seal(encode(hello))

    def _meet(self, plaintext: bytearray | memoryview) -> Proven:
        """Check the other side's Hello."""
        assert self._secrets is not None
        unproven = self._frames.peer
        hello, _ = decode(memoryview(plaintext))
        if not isinstance(hello, Hello):
            raise HandshakeFailed(unproven, "it did not say who it is")
        key = bytes.fromhex(hello.public_key)
        domain = HELLO_DOMAIN[self.remote is None]
        if not verify(key, domain, self._secrets.handshake_hash, bytes.fromhex(hello.signature)):
            raise HandshakeFailed(unproven, "its identity is not proven")
        peer = peer_id_of(key)
        if self.remote is not None and peer != self.remote.peer:
            raise HandshakeFailed(unproven, f"{peer} answered instead")
        self._refuse_unlisted(peer)
        if self.remote is None and self.me.access.allowed is not None:
            self._introduce()
        self._frames.trust(peer)
        self.done = True
        exporter = self._secrets.exporter(initiator=self.remote is not None)
        return Proven(
            peer,
            self._process_key,
            hello.software,
            hello.bundles,
            hello.loads,
            moves=hello.moves,
            skips=hello.skips,
            receipts=hello.receipts,
            exporter=exporter,
        )

    def _refuse_unlisted(self, peer: str) -> None:
        if not self.me.access.admits(peer):
            raise HandshakeFailed(peer, "it is not on this side's list of allowed peers")
