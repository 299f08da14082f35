"""The handshake against a published test vector, and against whoever does not belong."""

import pytest

from swarm.errors import HandshakeFailed
from swarm.net.noise import ChannelKey, Handshake, prologue

# Noise_IK_25519_AESGCM_SHA256 from the vectors of flynn/noise (vectors.txt, with prologue and payloads).
INITIATOR_STATIC = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
RESPONDER_STATIC = "0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20"
INITIATOR_EPHEMERAL = "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f"
RESPONDER_EPHEMERAL = "4142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f60"
PROLOGUE = "6e6f74736563726574"
MESSAGE_1 = (
    "358072d6365880d1aeea329adf9121383851ed21a28e3b75e965d0d2cd16625419d6fab175300a577115c701c41ed681373f0432f81d3bf8"
    "676bd05216cd1919e61b75ccef0c0cf0b216fcdf371d0859e6d8177aa9777fe9b8435bb6f8202c3acd9051a9aee0a63e76f6"
)
MESSAGE_2 = (
    "64b101b1d0be5a8704bd078f9895001fc03e8e9f9522f188dd128d9846d48466"
    "58a7bb8caac5097833909e90778571d34ce0e5b6ea4c3a76f102"
)
TRANSPORT_1 = ("79656c6c6f777375626d6172696e65", "80a75e75c8e8d2e9c2a6c7bc6e550c4997d6d2b45429a530821c4aa5d36f27")
TRANSPORT_2 = ("7375626d6172696e6579656c6c6f77", "b8475410da62a98493d33a1e669f8f56dd8f61d449b53bd375299c3435424a")


@pytest.mark.filterwarnings("ignore:One of ephemeral keypairs:UserWarning")
def test_matches_the_published_vector():
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    initiator_key = ChannelKey(bytes.fromhex(INITIATOR_STATIC))
    responder_key = ChannelKey(bytes.fromhex(RESPONDER_STATIC))
    initiator = Handshake(
        initiator_key, bytes.fromhex(PROLOGUE), responder_key.public, ephemeral=bytes.fromhex(INITIATOR_EPHEMERAL)
    )
    responder = Handshake(responder_key, bytes.fromhex(PROLOGUE), None, ephemeral=bytes.fromhex(RESPONDER_EPHEMERAL))
    message_1 = initiator.write(b"test_msg_0")
    assert message_1.hex() == MESSAGE_1
    assert responder.read(message_1) == b"test_msg_0"
    message_2 = responder.write(b"test_msg_1")
    assert message_2.hex() == MESSAGE_2
    assert initiator.read(message_2) == b"test_msg_1"

    ours, theirs = initiator.finish(), responder.finish()
    assert ours.send_key == theirs.receive_key
    assert ours.receive_key == theirs.send_key
    assert ours.handshake_hash == theirs.handshake_hash
    for key, (plaintext, ciphertext) in ((ours.send_key, TRANSPORT_1), (theirs.send_key, TRANSPORT_2)):
        assert AESGCM(key).encrypt(bytes(12), bytes.fromhex(plaintext), b"").hex() == ciphertext


@pytest.mark.parametrize("flip", [0, 40, 95])
def test_a_damaged_first_message_is_rejected(flip):
    responder_key = ChannelKey()
    message = bytearray(Handshake(ChannelKey(), prologue("public"), responder_key.public).write())
    message[flip] ^= 1
    with pytest.raises(HandshakeFailed):
        Handshake(responder_key, prologue("public"), None).read(bytes(message))


def test_another_network_is_rejected():
    responder_key = ChannelKey()
    message = Handshake(ChannelKey(), prologue("public"), responder_key.public).write()
    with pytest.raises(HandshakeFailed):
        Handshake(responder_key, prologue("private"), None).read(message)


def test_another_channel_key_is_rejected():
    message = Handshake(ChannelKey(), prologue("public"), ChannelKey().public).write()
    with pytest.raises(HandshakeFailed):
        Handshake(ChannelKey(), prologue("public"), None).read(message)
