"""The greeting, without loop or carrier."""

from dataclasses import replace

import pytest

from swarm.access import EVERYBODY, Access, NetworkKey
from swarm.config import PROTOCOL_VERSION
from swarm.errors import FrameRejected, HandshakeFailed, InvalidMessage, ProtocolMismatch
from swarm.identity import Identity
from swarm.net.endpoint import Remote
from swarm.net.frames import FRAME_BYTES_MAX, FrameReader, Sealer
from swarm.net.greeting import HELLO_DOMAIN, MAGIC, PREFACE, Greeting
from swarm.net.noise import ChannelKey, ChannelSecrets
from swarm.protocol.codec import decode, encode
from swarm.protocol.messages import Close, Hello
from swarm.version import __version__
from tests.net.support import endpoint, remote

OURS, THEIRS = Access(NetworkKey(b"o" * 32)), Access(NetworkKey(b"t" * 32))
SECRETS = ChannelSecrets(send_key=b"1" * 32, receive_key=b"2" * 32, handshake_hash=b"h" * 32)


class Side:
    """One side's greeting, with the bytes that it has to send."""

    def __init__(self, me, to=None):
        self.frames = FrameReader("a peer", 1024)
        self.greeting = Greeting(me, to, self.frames)
        self.proven = None
        self.sends = []
        self.advance()

    def take(self, data):
        self.frames.feed(data)
        self.advance()

    def advance(self):
        try:
            while self.proven is None and (self.frames.rest or not self.sends):
                self.proven = self.greeting.advance()
                if self.proven is None:
                    break
        finally:
            self.frames.hold(0.0, 0.0)
            if outgoing := self.greeting.take_outgoing():
                self.sends.append(outgoing)

    def taken(self):
        sends, self.sends = b"".join(self.sends), []
        return sends


def greet(a, b, turns=3):
    """Let both sides speak, until neither has anything to say."""
    for _ in range(turns):
        if data := a.taken():
            b.take(data)
        if data := b.taken():
            a.take(data)


def both(a_access=EVERYBODY, b_access=EVERYBODY, ids=None, a_network="public"):
    a_id, b_id = ids or (Identity.generate(), Identity.generate())
    b_me = endpoint(b_id, access=b_access)
    a_me = replace(endpoint(a_id, access=a_access), network=a_network)
    return Side(a_me, remote(b_me)), Side(b_me)


def test_both_sides_learn_who_the_other_is():
    a, b = both()
    greet(a, b)
    for side, other in ((a, b), (b, a)):
        me = other.greeting.me
        assert (side.proven.peer, side.proven.process_key) == (me.identity.peer_id, me.key.public)
        assert side.proven.software == __version__
        assert (side.frames.peer, side.frames.bytes_max) == (me.identity.peer_id, FRAME_BYTES_MAX)


def test_both_sides_seal_and_open_each_others_frames():
    a, b = both()
    greet(a, b)
    for side, other in ((a, b), (b, a)):
        other.frames.feed(side.greeting.sealer.seal([b"text"]))
        assert bytes(other.frames.next()) == b"text"


def test_a_greeting_arrives_a_byte_at_a_time():
    a, b = both()
    for _ in range(3):
        for from_, to in ((a, b), (b, a)):
            for byte in from_.taken():
                to.take(bytes([byte]))
    assert a.proven
    assert b.proven


def test_the_initiator_begins():
    a, b = both()
    assert a.sends[0].startswith(PREFACE)
    assert b.sends == []


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"x", b"swarX", MAGIC[:3] + b"X"])
def test_another_protocol_ends_at_the_first_wrong_byte(data):
    _, b = both()
    with pytest.raises(HandshakeFailed, match="does not speak"):
        b.take(data)


def test_a_protocol_mismatch_says_who_must_upgrade():
    for version, who in ((PROTOCOL_VERSION - 1, "the other side must"), (PROTOCOL_VERSION + 1, "this side must")):
        for side in both():
            with pytest.raises(ProtocolMismatch, match=who):
                side.take(MAGIC + bytes([version]))


@pytest.mark.parametrize(("access", "answer"), [(EVERYBODY, PREFACE), (OURS, b"")])
def test_a_private_swarm_answers_no_other_protocol(access, answer):
    _, b = both(b_access=access)
    with pytest.raises(ProtocolMismatch):
        b.take(MAGIC + bytes([PROTOCOL_VERSION + 1]))
    assert b.taken() == answer


def test_another_network_cannot_complete_a_handshake():
    a, b = both(a_network="elsewhere")
    with pytest.raises(HandshakeFailed):
        greet(a, b)
    assert b.taken() == b""


def test_another_identity_behind_the_right_channel_key_is_rejected():
    b_me = endpoint()
    a, b = Side(endpoint(), Remote(Identity.generate().peer_id, b_me.key.public)), Side(b_me)
    with pytest.raises(HandshakeFailed, match="answered instead"):
        greet(a, b)
    assert not a.greeting.done


class ForeignSigner:
    """Presents a signature that was made over another handshake."""

    def __init__(self, identity):
        self.public_key, self._identity = identity.public_key, identity

    def sign(self, domain, message):
        return self._identity.sign(domain, bytes(32))


def test_a_hello_signed_for_another_channel_proves_nothing():
    b_me = endpoint()
    a, b = Side(endpoint(ForeignSigner(Identity.generate())), remote(b_me)), Side(b_me)
    with pytest.raises(HandshakeFailed, match="not proven"):
        greet(a, b)
    assert b.proven is None


def hello(identity, initiator, digest=SECRETS.handshake_hash):
    signature = identity.sign(HELLO_DOMAIN[initiator], digest)
    return Hello(public_key=identity.public_key.hex(), signature=signature.hex(), software="1")


def shaken(initiator):
    """A side behind the handshake, and the sealer of its peer."""
    side = Side(endpoint(), Remote("a peer", ChannelKey().public) if initiator else None)
    side.greeting.shaken(SECRETS)
    return side, Sealer(SECRETS.receive_key)


def said_by(identity, initiator, secrets):
    """The Hello that our own code says on a channel of these secrets."""
    side = Side(endpoint(identity), Remote("a peer", ChannelKey().public) if initiator else None)
    side.greeting.shaken(secrets)
    reader = FrameReader("a peer", 1024)
    reader.open_with(Sealer(secrets.send_key))
    reader.feed(side.greeting.take_outgoing())
    return decode(memoryview(reader.next()))[0]


@pytest.mark.parametrize("initiator", [True, False])
def test_a_hello_of_the_same_direction_proves_nothing(initiator):
    """A reflected one would make a peer believe that it talks to itself."""
    identity = Identity.generate()
    said, (side, sealer) = said_by(identity, initiator, SECRETS), shaken(initiator)
    if initiator:
        side.greeting.remote = replace(side.greeting.remote, peer=identity.peer_id)
    with pytest.raises(HandshakeFailed, match="not proven"):
        side.take(sealer.seal(encode(said)))


@pytest.mark.parametrize("initiator", [True, False])
def test_a_hello_that_was_said_on_another_channel_proves_nothing(initiator):
    """Else a peer that was greeted once could pass for the one that greeted it."""
    identity = Identity.generate()
    for digest, is_proven in ((SECRETS.handshake_hash, True), (b"x" * 32, False)):
        said = said_by(identity, not initiator, replace(SECRETS, handshake_hash=digest))
        side, sealer = shaken(initiator)
        if initiator:
            side.greeting.remote = replace(side.greeting.remote, peer=identity.peer_id)
        try:
            side.take(sealer.seal(encode(said)))
        except HandshakeFailed:
            assert not is_proven
        assert (side.proven is not None) == is_proven


@pytest.mark.parametrize(
    ("plaintext", "error"), [([b"no message"], InvalidMessage), (encode(Close(session="ab" * 16)), HandshakeFailed)]
)
def test_another_message_instead_of_a_hello_ends_it(plaintext, error):
    for initiator in (True, False):
        side, sealer = shaken(initiator)
        with pytest.raises(error):
            side.take(sealer.seal(plaintext))


def test_an_unproven_peer_cannot_make_us_buffer():
    side, _ = shaken(initiator=False)
    with pytest.raises(FrameRejected):
        side.take((1025).to_bytes(4, "big"))


def test_an_unusable_channel_key_fails_at_the_start():
    with pytest.raises(HandshakeFailed, match="no usable point"):
        Side(endpoint(), Remote("a peer", bytes(32)))


# Private swarms


def test_members_of_a_private_swarm_prove_themselves():
    a, b = both(OURS, OURS)
    greet(a, b)
    assert a.proven
    assert b.proven


@pytest.mark.parametrize(("outside", "inside"), [(EVERYBODY, OURS), (THEIRS, OURS), (OURS, EVERYBODY)])
def test_a_stranger_to_a_private_swarm_gets_no_answer(outside, inside):
    a, b = both(outside, inside)
    with pytest.raises(HandshakeFailed):
        greet(a, b)
    assert b.taken() == b""  # not a byte: a stranger cannot even tell the protocol


def test_a_responder_with_a_list_says_last_who_it_is():
    listed, server = Identity.generate(), Identity.generate()
    a, b = both(b_access=Access(allowed=frozenset({listed.peer_id})), ids=(listed, server))
    b.take(a.taken())
    handshake = b.taken()
    assert len(handshake) == len(PREFACE) + 48  # no Hello behind it
    a.take(handshake)
    assert a.proven is None
    b.take(a.taken())
    assert b.proven
    a.take(b.taken())
    assert a.proven


def test_an_unlisted_peer_does_not_learn_who_answers():
    stranger, server = Identity.generate(), Identity.generate()
    a, b = both(b_access=Access(allowed=frozenset()), ids=(stranger, server))
    b.take(a.taken())
    a.take(b.taken())
    with pytest.raises(HandshakeFailed, match=f"{stranger.peer_id}.*list of allowed peers"):
        b.take(a.taken())
    assert (b.proven, b.taken()) == (None, b"")


def test_an_unlisted_peer_is_not_spoken_to():
    b_me = endpoint()
    greeting = Greeting(endpoint(access=Access(allowed=frozenset())), remote(b_me), FrameReader("a peer", 1024))
    with pytest.raises(HandshakeFailed, match=f"{b_me.identity.peer_id}.*list of allowed peers"):
        greeting.advance()
    assert greeting.take_outgoing() == b""


def test_a_key_and_a_list_hold_together():
    ids = Identity.generate(), Identity.generate()
    listed = Access(OURS.network_key, frozenset(identity.peer_id for identity in ids))
    a, b = both(listed, listed, ids)
    greet(a, b)
    assert b.proven
    for access, names in ((Access(THEIRS.network_key, listed.allowed), ids), (OURS, None)):
        a, b = both(access, listed, names)
        with pytest.raises(HandshakeFailed):
            greet(a, b)
