"""A sealed channel: messages between two proven identities over any carrier of bytes.

On the carrier:   preface, handshake message   (each side once, in the clear)
                  u32 length, sealed frame     (from then on)

A frame is sealed with AES-256-GCM. Its key belongs to one direction of one channel and its nonce is the frame's
number, so that a replayed, reordered, dropped or reflected frame fails; its associated data is the length; and its
plaintext is a whole message, header and tensors, so that session, epoch, step and tensor metadata are bound with the
bytes that they describe. The first frame of either side is a Hello, which binds the Ed25519 identity to the channel.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary

import structlog
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from swarm.access import EVERYBODY, Access
from swarm.activations import Activations
from swarm.config import PROTOCOL_VERSION
from swarm.errors import (
    ChannelClosed,
    FrameRejected,
    HandshakeFailed,
    InvalidMessage,
    NetworkError,
    ProtocolMismatch,
    SwarmError,
)
from swarm.identity import Identity, peer_id_of, verify
from swarm.net.buffers import SMALL_BYTES, Backlog, Buffers, Unread
from swarm.net.noise import MESSAGE_1_BYTES, MESSAGE_2_BYTES, ChannelKey, Handshake, prologue
from swarm.net.rate import Bucket, Line
from swarm.protocol.messages import AnyMessage, Hello, Message, Ping, Pong, decode, encode
from swarm.protocol.tensors import TENSOR_BYTES_MAX
from swarm.version import __version__

MAGIC = b"swarm"
PREFACE = MAGIC + bytes([PROTOCOL_VERSION])
FRAME_BYTES_MAX = TENSOR_BYTES_MAX + 64 * 1024 + 16  # one message: header, tensors and tag
FRAME_TIMEOUT_S = 30.0  # of reading, from its first byte to its last; a length that never comes ends the channel
LATE_POLL_S = 1.0  # then it is looked at again whether that is over, where this side did not read for some of it
TAG_BYTES = 16
HELLO_BYTES_MAX = 1024  # what a peer may send before it is proven
TURN_FRAMES = 16  # of one channel, a large one counts as many; then it is others' turn
CHATTER_PER_S, CHATTER_BURST = 4.0, 32.0  # messages of one peer that move nothing forward, and are free
ALL_CHATTER_PER_S, ALL_CHATTER_BURST = 300.0, 32.0  # the others, of all peers together
CHATTER_BYTES = 64 * 1024  # more of them cost like so many messages
BYTES_PER_S, BYTES_BURST = 64.0 * 1024, 256.0 * 1024  # of one peer, that are free
STEP_BYTES = 64 * 1024  # of a decode step that was taken, which are free as well
ALL_BYTES_PER_S, ALL_BYTES_BURST = 128.0 * 2**20, 1.0 * 2**20  # the others, of all peers together
PAUSE_S_MAX = 5.0  # then what is free has come back, or it is seen how long it takes now
SIGN_S = 0.3  # whoever is read no faster than it may hears from this side so often: what it asks has to wait
SIGNS_BURST = 8.0  # of one peer that a slow path lets arrive together
ALL_SIGNS_PER_S, ALL_SIGNS_BURST = 1000.0, 64.0  # to all peers together; each takes 15 microseconds of computing
UNASKED = 0  # the nonce of a Pong that is a sign of life and answers nothing
_log = structlog.get_logger("swarm.net")
_ENDED_EARLY = "it may have another network key, or a list of allowed peers that this side is not on"
_HELLO_DOMAIN = {True: b"swarm channel initiator", False: b"swarm channel responder"}


class Carrier(Protocol):
    """What a channel needs below it: an ordered stream of bytes. TCP today; a libp2p stream fits as well."""

    def write(self, data: bytes | bytearray) -> None:
        """Queue bytes for the other side."""
        ...

    def unsent_bytes(self) -> int:
        """Return how much is queued and not yet taken by the network."""
        ...

    def close(self) -> None:
        """Send what is queued, as far as the peer reads it soon, then end. Calls `Channel.lost` when it has ended."""
        ...

    def abort(self) -> None:
        """End at once, whatever is queued."""
        ...

    def pause_reading(self) -> None:
        """Take nothing from the network for now, so that the other side must wait."""
        ...

    def resume_reading(self) -> None:
        """Go on."""
        ...


OnMessage = Callable[["Channel", AnyMessage, Activations | None], None]
"""Takes a channel's messages, one by one, in the loop. Must not block."""


class Allowance:
    """What one peer has free, on all of its channels together; or one channel, before it is proven whose it is."""

    def __init__(self) -> None:
        self.chatter = Bucket(CHATTER_PER_S, CHATTER_BURST)
        self.inflow = Bucket(BYTES_PER_S, BYTES_BURST)
        self.signs = Bucket(1 / SIGN_S, SIGNS_BURST)


@dataclass(frozen=True, slots=True)
class Self:
    """This side, as it presents itself on its channels."""

    identity: Identity
    key: ChannelKey
    network: str
    access: Access = EVERYBODY
    clock: Callable[[], float] = time.perf_counter  # seconds, for round trips: uvloop's own time has steps of 1 ms
    buffers: Buffers = field(default_factory=Buffers)
    chatter: Line = field(default_factory=lambda: Line(ALL_CHATTER_PER_S, ALL_CHATTER_BURST))
    inflow: Line = field(default_factory=lambda: Line(ALL_BYTES_PER_S, ALL_BYTES_BURST))
    signs: Bucket = field(default_factory=lambda: Bucket(ALL_SIGNS_PER_S, ALL_SIGNS_BURST))
    allowances: "WeakValueDictionary[str, Allowance]" = field(default_factory=WeakValueDictionary)  # of proven peers
    public: bool = False  # the swarm is: loopback and private addresses are not dialled

    @property
    def psk(self) -> bytes | None:
        """What a private swarm's handshakes mix in, 32 bytes."""
        key = self.access.network_key
        return key.derive("handshake") if key is not None else None


@dataclass(frozen=True, slots=True)
class Remote:
    """The peer that an initiator wants to reach: it must prove both keys."""

    peer: str
    channel_key: bytes


class Channel:
    """One connection to one peer. Lives in the event loop."""

    def __init__(self, carrier: Carrier, me: Self, on_message: OnMessage, remote: Remote | None = None) -> None:
        """remote: whom to reach, which makes this side the initiator; None waits for whoever comes.

        `ready` is done when the peer has proven who it is, or raises the NetworkError that says why not; `ended` is
        done, with the reason, when the channel is over.
        """
        self._loop = asyncio.get_running_loop()
        self.peer = remote.peer if remote is not None else "an unproven peer"
        self.remote_key = remote.channel_key if remote is not None else b""  # of the process; proven when `peer` is
        self.software = ""
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # may end unobserved
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self.heard_at = self._loop.time()  # when bytes last arrived
        self.unreachable = False  # it has ended since the network failed; the peer did nothing
        self._carrier = carrier
        self._me = me
        self._on_message = on_message
        self._remote = remote
        self._unread = Unread()
        self._due = 0  # bytes of the frame that it begins with, where that is known and not complete
        self._unfinished: asyncio.TimerHandle | None = None
        self._unfinished_since = self.heard_at
        self._backlog = Backlog(carrier.unsent_bytes)
        self._paused: asyncio.TimerHandle | None = None
        self._paused_at, self._paused_s = 0.0, 0.0  # when it last was, and for how long in all before
        self._paced_until = 0.0
        self._owed: dict[Line, tuple[Bucket, float]] = {}  # how much it waits for, and what of its peer's own may pay
        self._signer: asyncio.TimerHandle | None = None
        self._allowance = Allowance()
        self._pong: asyncio.Future[None] = self._loop.create_future()
        self._pingers = 0  # that wait for it
        self._nonce = 0
        self._pinged_at = 0.0
        self._handshake: Handshake | None = Handshake(
            me.key, prologue(me.network), remote.channel_key if remote is not None else None, psk=me.psk
        )
        self._handshake_hash = b""
        self._sealer: Sealer | None = None
        self._opener: Sealer | None = None
        if remote is not None:
            try:
                self._refuse_unlisted(remote.peer)
                carrier.write(PREFACE + self._handshake.write())
            except HandshakeFailed as error:  # whoever announced such a key; `ready` tells
                self._fail(error)

    # Sending

    def send(self, message: Message, activations: Activations | None = None) -> None:
        """Seal and queue one message. Raises ChannelClosed when the channel has ended."""
        if self.closed:
            raise ChannelClosed(self.peer, self.ended.result())
        self._write(encode(message, activations))
        if self._carrier.unsent_bytes() > SMALL_BYTES:
            self._me.buffers.note(self)

    async def ping(self) -> float:
        """Ask for a sign of life, under the caller's deadline. Returns seconds. Raises ChannelClosed.

        Whoever asks while others wait for an answer gets the same one.
        """
        if not self._pingers:
            self._nonce += 1
            self._pinged_at, self._pong = self._me.clock(), self._loop.create_future()
            self.send(Ping(nonce=self._nonce))
        self._pingers += 1
        try:
            await asyncio.shield(self._pong)
        finally:
            self._pingers -= 1
        return self._me.clock() - self._pinged_at

    @property
    def proven(self) -> bool:
        """Whether the peer has proven who it is."""
        return self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None

    @property
    def unsent_bytes(self) -> int:
        """What is queued and not yet on its way."""
        return 0 if self.closed else self._carrier.unsent_bytes()

    @property
    def sent_bytes(self) -> int:
        """What is on its way or has arrived, since the start."""
        return self._backlog.sent

    @property
    def closed(self) -> bool:
        """Whether the channel has ended."""
        return self.ended.done()

    def close(self) -> None:
        """End the channel in good order."""
        self._end("closed by this side")
        self._carrier.close()

    def pause(self, for_s: float) -> None:
        """Read nothing more for a while, at most PAUSE_S_MAX, and until what it owes is paid."""
        if self.closed or self._paused is not None:
            return
        for_s = min(for_s, PAUSE_S_MAX)
        self._stop_reading(for_s)
        if for_s > 0:  # else it is but others' turn
            self._paced_until = self._paused_at + for_s
            self._sign_soon()

    def _stop_reading(self, for_s: float) -> None:
        self._carrier.pause_reading()
        self._paused_at = self._loop.time()
        self._paused = self._loop.call_later(min(for_s, PAUSE_S_MAX), self._resume)

    def paid(self, line: Line) -> None:
        """What it has used is paid for, by what all share: called by the line."""
        self._owed.pop(line, None)
        if not self._owed and self._paused is not None and self._loop.time() >= self._paced_until:
            self._paused.cancel()
            self._resume()

    @property
    def is_paused(self) -> bool:
        """Whether nothing is read now."""
        return self._paused is not None

    def _resume(self) -> None:
        """Read on, unless neither what is free by now nor its turn has paid for all that it has used."""
        now, wait_s = self._loop.time(), 0.0
        for line, (free, amount) in list(self._owed.items()):
            if missing_s := free.take(now, amount):
                wait_s = max(wait_s, missing_s)
            else:
                del self._owed[line]
                line.leave(self)
        if self._owed:
            self._paused = self._loop.call_later(min(wait_s, PAUSE_S_MAX), self._resume)
            return
        self._paused = None
        self._paused_s += now - self._paused_at
        if not self.closed:
            self._carrier.resume_reading()
            self._take(b"")

    def _sign_soon(self) -> None:
        """Give a sign of life in SIGN_S, and no earlier after short pauses in a row."""
        if self._signer is None and self.proven:
            self._signer = self._loop.call_later(SIGN_S, self._sign)

    def _sign(self) -> None:
        self._signer = None
        now = self._loop.time()
        # What a peer does not read must not grow, and what none of them has asked for must stay cheap.
        if self._carrier.unsent_bytes() == 0 and self._me.signs.take(now) == 0:
            self.send(Pong(nonce=UNASKED))
        if now < self._paced_until or self._owed:
            self._sign_soon()

    def note_chatter(self, activations: Activations | None = None) -> None:
        """Count a message that moves no session forward, and what came with it.

        Each peer has some free. For those beyond that all channels share what this side has time for, and the one
        that sent this is not read until it is paid for.
        """
        n_bytes = 0 if activations is None else activations.n_bytes
        self._charge(self._allowance.chatter, self._me.chatter, 1 + n_bytes / CHATTER_BYTES, self._loop.time())

    def note_decode(self, n_bytes: int) -> None:
        """Do not count the bytes of a decode step that was taken: computing bounds how many there can be.

        Else who decodes faster than a peer's free bytes come is read as slowly as those who send too much.
        """
        self._allowance.inflow.give(min(n_bytes, STEP_BYTES))

    def _charge(self, free: Bucket, shared: Line, amount: float, now: float) -> None:
        """Take what was used from what its peer has free, or from what all share; else read nothing until one has it.

        So it waits for its turn, but no longer than if there were nobody but its peer's own channels.
        """
        wait_s = free.take(now, amount)
        if wait_s == 0 or self.closed or shared.pay(self, amount, now):
            return
        _, before = self._owed.get(shared, (free, 0.0))
        self._owed[shared] = (free, before + amount)
        if self._paused is None:
            self._stop_reading(wait_s)
        self._sign_soon()

    # What it holds, for `Buffers`

    @property
    def held_bytes(self) -> int:
        """Bytes that are not read: by this side, since their frame is not complete, and by the peer."""
        return len(self._unread) + self._carrier.unsent_bytes()

    @property
    def held_since(self) -> float:
        """Since when, in the loop's time."""
        since = self._backlog.since(self._loop.time())
        return min(since, self._unfinished_since) if self._unread else since

    def reads(self) -> bool:
        """Whether the peer has taken anything since this was last asked, or there is nothing for it to take."""
        return self._backlog.moves()

    def cut_off(self, why: str) -> None:
        """End the channel at once, with nothing more sent."""
        self._give_up(ChannelClosed(self.peer, why))
        self._carrier.abort()

    # Receiving: called by the carrier

    def receive(self, data: bytes) -> None:
        """Take bytes as they arrive, in any pieces."""
        if self.closed:
            return
        self.heard_at = now = self._loop.time()
        self._take(data)
        self._charge(self._allowance.inflow, self._me.inflow, len(data), now)

    def lost(self, why: str) -> None:
        """The carrier has ended."""
        self._end(why)
        self._me.buffers.discard(self)

    def _take(self, data: bytes | memoryview) -> None:
        goes_on = len(self._unread) > 0
        if goes_on or self._paused is not None:
            self._unread.add(data)
            if len(self._unread) > SMALL_BYTES:
                self._me.buffers.note(self)
            if len(self._unread) < self._due or self._paused is not None:
                return
            data = self._unread.take()
        read = 0
        try:
            if self._handshake is not None:
                read = self._shake_hands(bytes(data))
            if self._handshake is None:
                read = self._read_frames(data, read)
        except SwarmError as error:
            self._fail(error)
        if self.closed:
            return
        if rest := data[read:]:
            self._unread.begin(self._due)
            self._unread.add(rest)
        if read or not goes_on:
            self._await_rest()

    # The handshake

    def _shake_hands(self, data: bytes) -> int:
        """Take the other side's preface and handshake message, if they are there. Returns how many bytes they are."""
        assert self._handshake is not None
        if not data.startswith(MAGIC[: len(data)]):
            raise HandshakeFailed(self.peer, "it does not speak the swarm's protocol")
        if len(data) < len(PREFACE):
            return 0
        theirs = data[len(MAGIC)]
        if theirs != PROTOCOL_VERSION:
            if self._remote is None and self._me.psk is None:  # whoever has no network key hears nothing of this side
                self._carrier.write(PREFACE)  # so that the other side can say who must upgrade
            raise ProtocolMismatch(self.peer, theirs, PROTOCOL_VERSION)
        size = len(PREFACE) + (MESSAGE_2_BYTES if self._remote is not None else MESSAGE_1_BYTES)
        if len(data) < size:
            return 0
        self._handshake.read(data[len(PREFACE) : size])
        if self._remote is None:
            self.remote_key = self._handshake.remote_public
            self._carrier.write(PREFACE + self._handshake.write())
        secrets = self._handshake.finish()
        self._handshake = None
        self._handshake_hash = secrets.handshake_hash
        self._sealer = Sealer(secrets.send_key)
        self._opener = Sealer(secrets.receive_key)
        if self._remote is not None or self._me.access.allowed is None:
            self._introduce()  # else not before we know that whoever comes is on the list
        return size

    def _introduce(self) -> None:
        identity = self._me.identity
        signature = identity.sign(_HELLO_DOMAIN[self._remote is not None], self._handshake_hash)
        self._write(
            encode(Hello(public_key=identity.public_key.hex(), signature=signature.hex(), software=__version__))
        )

    def _meet(self, hello: AnyMessage) -> None:
        """Check the other side's Hello: from here on its peer id is proven."""
        if not isinstance(hello, Hello):
            raise HandshakeFailed(self.peer, "it did not say who it is")
        key = bytes.fromhex(hello.public_key)
        domain = _HELLO_DOMAIN[self._remote is None]
        if not verify(key, domain, self._handshake_hash, bytes.fromhex(hello.signature)):
            raise HandshakeFailed(self.peer, "its identity is not proven")
        peer = peer_id_of(key)
        if self._remote is not None and peer != self._remote.peer:
            raise HandshakeFailed(self.peer, f"{peer} answered instead")
        self._refuse_unlisted(peer)
        if self._remote is None and self._me.access.allowed is not None:
            self._introduce()
        self.peer = peer
        self._allowance = self._me.allowances.setdefault(peer, self._allowance)
        self.software = hello.software
        self.ready.set_result(None)

    def _refuse_unlisted(self, peer: str) -> None:
        if not self._me.access.admits(peer):
            raise HandshakeFailed(peer, "it is not on this side's list of allowed peers")

    # Frames

    def _write(self, parts: Sequence[bytes | memoryview]) -> None:
        assert self._sealer is not None
        frame = self._sealer.seal(parts)
        self._carrier.write(frame)
        self._backlog.wrote(len(frame), self._loop.time())

    def _read_frames(self, data: bytes | memoryview, taken: int) -> int:
        """Read the whole frames that follow the first `taken` bytes. Returns how many bytes have been taken then."""
        assert self._opener is not None
        self._due, turn = 0, 0.0
        while len(data) - taken >= 4 and not self.closed and self._paused is None:
            start = taken + 4
            length = data[taken:start]
            size = int.from_bytes(length, "big")
            if not TAG_BYTES < size <= (FRAME_BYTES_MAX if self.ready.done() else HELLO_BYTES_MAX):
                raise FrameRejected(self.peer, f"it claims {size} bytes")
            if len(data) < start + size:
                self._due = 4 + size
                break
            taken = start + size
            ciphertext = memoryview(data)[start:taken]
            if start != 4:
                ciphertext = ciphertext.toreadonly()  # it is not aligned as tensors must be
            try:
                plaintext = self._opener.open(length, ciphertext)
            except InvalidTag:
                raise FrameRejected(self.peer, "it fails authentication") from None
            message, activations = decode(memoryview(plaintext))
            self._dispatch(message, activations)
            turn += 1 + size / CHATTER_BYTES
            if turn >= TURN_FRAMES:
                self.pause(0.0)
        return taken

    def _dispatch(self, message: AnyMessage, activations: Activations | None) -> None:
        if not self.ready.done():
            self._meet(message)
        elif isinstance(message, Hello):
            raise InvalidMessage("hello", "it comes once")
        elif isinstance(message, Ping):
            self.note_chatter()
            self.send(Pong(nonce=message.nonce))
        elif isinstance(message, Pong):
            if self._pingers and message.nonce == self._nonce and not self._pong.done():
                self._pong.set_result(None)
            elif not self._is_sign(message):
                self.note_chatter()
        else:
            self._on_message(self, message, activations)

    def _is_sign(self, pong: Pong) -> bool:
        """Whether it is a sign of life that is free: from whom this side has dialled, as often as one may give them.

        So whoever comes to us gains nothing by them.
        """
        if self._remote is None or pong.nonce != UNASKED:
            return False
        return self._allowance.signs.take(self._loop.time()) == 0

    def _await_rest(self) -> None:
        """A frame has begun, or the one before it is complete: what is unread must be complete in time.

        The time counts in which this side reads: while it does not, nothing can come.
        """
        if self._unfinished is not None:
            self._unfinished.cancel()
            self._unfinished = None
        if self._unread:
            self._unfinished_since = self._loop.time()
            self._unfinished = self._loop.call_later(FRAME_TIMEOUT_S, self._refuse_if_late, self._not_read_s)

    @property
    def _not_read_s(self) -> float:
        """For how long this side has read nothing, in all."""
        return self._paused_s + (0.0 if self._paused is None else self._loop.time() - self._paused_at)

    def _refuse_if_late(self, not_read_s: float) -> None:
        """End it, if the rest of a frame has had its time. not_read_s: until the frame began."""
        waited_s = self._loop.time() - self._unfinished_since - (self._not_read_s - not_read_s)
        if self._paused is None and waited_s >= FRAME_TIMEOUT_S - LATE_POLL_S:
            self._fail(FrameRejected(self.peer, f"its rest did not come within {FRAME_TIMEOUT_S:.0f} s"))
        else:
            wait_s = max(LATE_POLL_S, FRAME_TIMEOUT_S - waited_s)
            self._unfinished = self._loop.call_later(wait_s, self._refuse_if_late, not_read_s)

    # The end

    def _fail(self, error: SwarmError) -> None:
        self._give_up(error)
        self._carrier.close()

    def _give_up(self, error: SwarmError) -> None:
        if self.closed:
            return
        _log.info("channel failed", peer=self.peer, why=str(error))
        if not self.ready.done():
            known = error if isinstance(error, NetworkError) else HandshakeFailed(self.peer, str(error))
            self.ready.set_exception(known)
        self._end(str(error))

    def _end(self, why: str) -> None:
        if self.closed:
            return
        self.ended.set_result(why)
        self._unread = Unread()
        for timer in (self._unfinished, self._paused, self._signer):
            if timer is not None:
                timer.cancel()
        for line in self._owed:
            line.leave(self)
        self._owed.clear()
        if not self.ready.done():
            hint = "" if self._remote is None else f"; {_ENDED_EARLY}"
            self.ready.set_exception(HandshakeFailed(self.peer, f"the connection ended: {why}{hint}"))
        if not self._pong.done():
            self._pong.set_exception(ChannelClosed(self.peer, why))
            self._pong.exception()  # perhaps nobody waits for it


class Sealer:
    """Seals, or opens, the frames of one direction in their order."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._number = 0

    def seal(self, parts: Sequence[bytes | memoryview]) -> bytes:
        """Return u32 length and ciphertext of the parts put together."""
        plaintext = b"".join(parts)
        size = len(plaintext) + TAG_BYTES
        assert size <= FRAME_BYTES_MAX
        length = size.to_bytes(4, "big")
        return length + self._aead.encrypt(self._nonce(), plaintext, length)

    def open(self, length: bytes | memoryview, ciphertext: memoryview) -> bytearray | memoryview:
        """Return the plaintext of what came after its u32 length. Raises InvalidTag.

        What may be written to is opened in place (OpenSSL's ciphers read where they write): large frames cost no copy.
        """
        size = len(ciphertext) - TAG_BYTES
        plaintext = bytearray(size) if ciphertext.readonly else ciphertext[:size]
        self._aead.decrypt_into(self._nonce(), ciphertext, length, plaintext)
        return plaintext

    def _nonce(self) -> bytes:
        self._number += 1
        return b"\0\0\0\0" + self._number.to_bytes(8, "big")
