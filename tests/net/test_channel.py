"""Channels over an in-memory carrier that can be tampered with (real TCP is in test_tcp.py)."""

import asyncio

import pytest
import torch

from swarm.access import EVERYBODY, Access, NetworkKey
from swarm.activations import Activations
from swarm.errors import ChannelClosed, HandshakeFailed, ProtocolMismatch
from swarm.identity import Identity
from swarm.net import channel as channel_module
from swarm.net.channel import Channel
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.noise import ChannelKey
from swarm.protocol.messages import Close, Output, Step, encode
from swarm.protocol.tensors import meta_of

SESSION = "ab" * 16


class Pipe:
    """One direction of an in-memory connection; what is written waits in `held` until it is delivered."""

    def __init__(self):
        self.held = []
        self.channel = None  # the one that receives
        self.sender = None
        self.closed = self.paused = False
        self.back = self  # the other direction

    def write(self, data):
        self.held.append(bytes(data))

    def unsent_bytes(self):
        return sum(map(len, self.held))

    def close(self):
        self.closed = True
        if self.sender is not None:
            self.sender.lost("closed")

    def abort(self):
        self.held.clear()
        self.close()

    def pause_reading(self):
        self.back.paused = True

    def resume_reading(self):
        self.back.paused = False

    def deliver(self):
        if self.paused:
            return
        data, self.held = b"".join(self.held), []
        if data:
            self.channel.receive(data)


class Pair:
    """Two channels, connected."""

    def __init__(self, *, network="public", remote=None, a_access=EVERYBODY, b_access=EVERYBODY, ids=None):
        self.a_id, self.b_id = ids or (Identity.generate(), Identity.generate())
        b_key = ChannelKey()
        self.to_a, self.to_b = Pipe(), Pipe()
        self.at_a, self.at_b = [], []
        remote = remote or Remote(self.b_id.peer_id, b_key.public)
        b_self, a_self = (
            Endpoint(self.b_id, b_key, "public", b_access),
            Endpoint(self.a_id, ChannelKey(), network, a_access),
        )
        self.b = Channel(self.to_a, b_self, lambda *args: self.at_b.append(args[1:]))
        self.a = Channel(self.to_b, a_self, lambda *args: self.at_a.append(args[1:]), remote)
        self.to_a.channel, self.to_b.channel = self.a, self.b
        self.to_a.back, self.to_b.back = self.to_b, self.to_a
        self.to_a.sender, self.to_b.sender = self.b, self.a

    def shake(self):
        for _ in range(3):
            self.to_b.deliver()
            self.to_a.deliver()
        return self


def step(number=1):
    hidden = torch.randn(1, 3, 8)
    return Step(session=SESSION, epoch=0, step=number, keep=0, budget_ms=1000, want=1, hidden=meta_of(hidden)), hidden


async def test_both_sides_learn_who_the_other_is():
    pair = Pair().shake()
    assert pair.a.proven
    assert pair.b.proven
    assert (pair.a.peer, pair.b.peer) == (pair.b_id.peer_id, pair.a_id.peer_id)
    assert (pair.a.remote_key, pair.b.remote_key) == (pair.b._me.key.public, pair.a._me.key.public)


async def test_a_message_arrives_as_it_was_sent():
    pair = Pair().shake()
    message, hidden = step()
    pair.a.send(message, Activations(hidden))
    pair.to_b.deliver()
    ((received, got),) = pair.at_b
    assert received == message
    assert torch.equal(got.hidden, hidden)


async def test_messages_arrive_in_any_pieces():
    pair = Pair().shake()
    for number in range(3):
        message, hidden = step(number)
        pair.a.send(message, Activations(hidden))
    stream = b"".join(pair.to_b.held)
    for i in range(0, len(stream), 7):
        pair.b.receive(stream[i : i + 7])
    assert [message.step for message, _ in pair.at_b] == [0, 1, 2]


async def test_a_flipped_bit_anywhere_is_rejected():
    for position in range(4 + 16 + 300):
        pair = Pair().shake()
        message, hidden = step()
        pair.a.send(message, Activations(hidden))
        frame = bytearray(pair.to_b.held.pop())
        if position >= len(frame):
            break
        frame[position] ^= 1 << (position % 8)
        pair.b.receive(bytes(frame) + bytes(1 << 16))
        assert pair.at_b == []
        assert pair.b.closed or position < 4  # a longer length waits for bytes that never come


@pytest.mark.parametrize("attack", ["replay", "reorder", "drop", "reflect"])
async def test_a_frame_out_of_its_place_is_rejected(attack):
    pair = Pair().shake()
    for number in (1, 2):
        message, hidden = step(number)
        pair.a.send(message, Activations(hidden))
    first, second = pair.to_b.held
    pair.to_b.held = []
    victim = pair.b
    match attack:
        case "replay":
            stream = first + first
        case "reorder":
            stream = second + first
        case "drop":
            stream = second
        case "reflect":
            stream, victim = first, pair.a
    victim.receive(stream)
    assert victim.closed
    assert len(pair.at_b) == (1 if attack == "replay" else 0)
    assert pair.at_a == []


async def test_a_frame_of_another_channel_between_the_same_peers_is_rejected():
    one, two = Pair().shake(), Pair().shake()
    message, hidden = step()
    one.a.send(message, Activations(hidden))
    two.b.receive(one.to_b.held[0])
    assert two.b.closed
    assert two.at_b == []


async def test_another_identity_behind_the_right_channel_key_is_rejected():
    pair = Pair()
    impostor = Pair(remote=Remote(Identity.generate().peer_id, pair.b._me.key.public))
    impostor.b._me = pair.b._me
    impostor.to_b.channel = Channel(impostor.to_a, pair.b._me, lambda *_: None)
    impostor.shake()
    assert isinstance(impostor.a.ready.exception(), HandshakeFailed)
    assert "answered instead" in str(impostor.a.ready.exception())


async def test_a_hello_signed_for_another_channel_proves_nothing():
    pair = Pair()
    pair.a._me = Endpoint(ForeignSigner(pair.a_id), pair.a._me.key, "public")
    pair.shake()
    assert isinstance(pair.b.ready.exception(), HandshakeFailed)
    assert pair.b.closed


class ForeignSigner:
    """Presents a signature that was made over another handshake."""

    def __init__(self, identity):
        self.public_key, self._identity = identity.public_key, identity

    def sign(self, domain, message):
        return self._identity.sign(domain, bytes(32))


async def test_a_hello_that_is_none_is_a_failed_handshake():
    """Whatever a peer sends before it is proven, who dialled it gets a NetworkError."""
    for garbage in ([b"no message"], list(encode(Close(session=SESSION)))):
        pair = Pair()
        pair.to_b.deliver()
        handshake, _hello = pair.to_a.held
        pair.b._sealer._number = 0
        pair.to_a.held = [handshake, bytes(pair.b._sealer.seal(garbage))]
        pair.to_a.deliver()
        with pytest.raises(HandshakeFailed):
            pair.a.ready.result()


async def test_another_network_cannot_complete_a_handshake():
    pair = Pair(network="elsewhere").shake()
    assert isinstance(pair.b.ready.exception(), HandshakeFailed)
    assert not pair.a.proven


async def test_another_protocol_says_who_must_upgrade(monkeypatch):
    pair = Pair()
    monkeypatch.setattr(channel_module, "PROTOCOL_VERSION", 9)
    pair.b.receive(channel_module.MAGIC + bytes([1]))  # what the older side sent
    error = pair.b.ready.exception()
    assert isinstance(error, ProtocolMismatch)
    assert "the other side must upgrade" in str(error)
    monkeypatch.undo()
    pair.a.receive(channel_module.MAGIC + bytes([9]))
    assert "this side must upgrade" in str(pair.a.ready.exception())


async def test_a_private_swarm_does_not_tell_strangers_of_any_protocol_that_it_is_one():
    for access, answers in ((EVERYBODY, [channel_module.PREFACE]), (Access(NetworkKey(b"k" * 32)), [])):
        pair = Pair(b_access=access)
        pair.b.receive(channel_module.MAGIC + bytes([channel_module.PROTOCOL_VERSION + 1]))
        assert isinstance(pair.b.ready.exception(), ProtocolMismatch)
        assert pair.to_a.held == answers


async def test_what_is_not_our_protocol_ends_at_the_first_byte():
    pair = Pair()
    pair.b.receive(b"GET / HTTP/1.1\r\n")
    assert pair.b.closed


async def test_an_unproven_peer_cannot_make_us_buffer():
    pair = Pair()
    pair.to_b.deliver()
    pair.to_a.deliver()
    pair.b.receive((1 << 20).to_bytes(4, "big"))
    assert pair.b.closed


async def test_a_peer_that_does_not_read_is_cut_off_and_what_waited_for_it_is_gone():
    pair = Pair().shake()
    pair.a._me.buffers._held_bytes_max = 4 << 20
    message, hidden = step()
    big = torch.zeros(1, 1 << 16, 4)  # 1 MiB
    for _ in range(3):
        pair.a.send(message.model_copy(update={"hidden": meta_of(big)}), Activations(big))
        assert not pair.a.closed
    pair.a.send(message.model_copy(update={"hidden": meta_of(big)}), Activations(big))
    with pytest.raises(ChannelClosed, match="hold too much"):
        pair.a.send(message, Activations(hidden))
    assert pair.to_b.held == []


async def test_a_frame_that_never_ends_ends_the_channel(monkeypatch):
    monkeypatch.setattr(channel_module, "FRAME_TIMEOUT_S", 0.1)
    pair = Pair().shake()
    message, hidden = step()
    pair.a.send(message, Activations(hidden))
    frame = pair.to_b.held.pop()
    pair.b.receive(frame[:40])
    await asyncio.sleep(0.05)
    pair.b.receive(frame[40:])
    await asyncio.sleep(0.1)
    assert not pair.b.closed  # it came in time, and nothing is unfinished
    pair.a.send(message, Activations(hidden))
    pair.b.receive(pair.to_b.held.pop()[:-1])
    await asyncio.sleep(0.05)
    pair.b.receive(b"")  # a byte now and then, or none, makes no difference
    async with asyncio.timeout(5):
        assert "did not come" in await pair.b.ended


@pytest.mark.virtual_clock
async def test_the_time_of_a_frame_counts_only_while_it_is_read():
    """Else whoever waits in a long line is taken for somebody who does not send the rest."""
    pair = Pair().shake()
    message, hidden = step()
    pair.a.send(message, Activations(hidden))
    frame = pair.to_b.held.pop()
    pair.b.receive(frame[:40])
    for _ in range(20):
        pair.b.pause(4.0)
        await asyncio.sleep(5.0)
    assert not pair.b.closed  # 20 seconds of a hundred were for reading
    pair.b.receive(frame[40:])
    assert len(pair.at_b) == 1
    pair.a.send(message, Activations(hidden))
    pair.b.receive(pair.to_b.held.pop()[:40])
    for _ in range(8):
        pair.b.pause(4.0)
        await asyncio.sleep(9.0)
    assert "did not come" in pair.b.ended.result()


async def test_sending_on_a_closed_channel_says_so():
    pair = Pair().shake()
    pair.a.close()
    with pytest.raises(ChannelClosed):
        pair.a.send(Close(session=SESSION))


async def test_a_ping_measures_the_round_trip():
    pair = Pair().shake()
    asyncio.get_running_loop().call_later(0.05, pair.shake)
    async with asyncio.timeout(5):
        assert 0.04 < await pair.a.ping() < 5


async def test_whoever_pings_while_others_wait_shares_their_answer():
    pair = Pair().shake()
    pings = [asyncio.create_task(pair.a.ping()) for _ in range(100)]
    await asyncio.sleep(0)
    assert len(pair.to_b.held) == 1
    pair.shake()
    assert len(await asyncio.gather(*pings)) == 100
    pings = [asyncio.create_task(pair.a.ping()) for _ in range(100)]
    await asyncio.sleep(0)
    pair.a.lost("gone")
    ends = await asyncio.gather(*pings, return_exceptions=True)
    assert {type(end) for end in ends} == {ChannelClosed}


async def test_a_ping_that_nobody_waits_for_any_more_measures_nothing():
    pair = Pair().shake()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await pair.a.ping()
    ping = asyncio.create_task(pair.a.ping())
    await asyncio.sleep(0)
    later = pair.to_b.held.pop()
    pair.shake()
    await asyncio.sleep(0)
    assert not ping.done()
    pair.to_b.held.append(later)
    pair.shake()
    async with asyncio.timeout(5):
        await ping


async def test_bytes_behind_a_message_without_tensors_are_rejected():
    pair = Pair().shake()
    pair.a.send(Output(session=SESSION, epoch=0, step=1), Activations(torch.ones(4)))
    pair.to_b.deliver()
    assert pair.b.closed
    assert pair.at_b == []


# Private swarms

OURS, THEIRS = Access(NetworkKey(b"o" * 32)), Access(NetworkKey(b"t" * 32))


async def test_members_of_a_private_swarm_talk():
    pair = Pair(a_access=OURS, b_access=OURS).shake()
    message, hidden = step()
    pair.a.send(message, Activations(hidden))
    pair.to_b.deliver()
    assert [received for received, _ in pair.at_b] == [message]


@pytest.mark.parametrize(("outside", "inside"), [(EVERYBODY, OURS), (THEIRS, OURS), (OURS, EVERYBODY)])
async def test_without_the_networks_key_a_handshake_ends_with_the_first_message_and_no_answer(outside, inside):
    pair = Pair(a_access=outside, b_access=inside)
    pair.to_b.deliver()
    assert isinstance(pair.b.ready.exception(), HandshakeFailed)
    assert pair.to_a.held == []  # not a byte: who is no member cannot even tell what answers
    assert not pair.a.proven


async def test_a_peer_that_is_not_on_the_list_is_refused_and_nothing_of_it_is_processed():
    listed, stranger, server = (Identity.generate() for _ in range(3))
    access = Access(allowed=frozenset({listed.peer_id}))
    for client, admitted in ((listed, True), (stranger, False)):
        pair = Pair(b_access=access, ids=(client, server))
        pair.to_b.deliver()
        pair.to_a.deliver()
        assert pair.to_a.held == []  # the server does not say who it is before it knows who comes
        message, hidden = step()
        pair.a.send(message, Activations(hidden))
        pair.to_b.deliver()  # a Hello and a step at once
        pair.to_a.deliver()
        assert pair.a.proven == admitted
        assert (len(pair.at_b), pair.b.proven, pair.b.closed) == (int(admitted), admitted, not admitted)
        if not admitted:
            assert stranger.peer_id in str(pair.b.ready.exception())
            pair.a.lost("the other side ended it")
            assert "not on" in str(pair.a.ready.exception())


async def test_a_peer_that_is_not_on_the_list_is_not_spoken_to():
    pair = Pair(a_access=Access(allowed=frozenset()))
    assert pair.to_b.held == []
    with pytest.raises(HandshakeFailed, match=f"{pair.b_id.peer_id}.*list of allowed peers"):
        await pair.a.ready


async def test_a_key_and_a_list_hold_together():
    ids = Identity.generate(), Identity.generate()
    both = Access(OURS.network_key, frozenset(identity.peer_id for identity in ids))
    assert Pair(a_access=both, b_access=both, ids=ids).shake().b.proven
    assert not Pair(a_access=Access(THEIRS.network_key, both.allowed), b_access=both, ids=ids).shake().b.proven
    assert not Pair(a_access=OURS, b_access=both).shake().b.proven
