"""The handshake against a published test vector, and against strangers."""

import pytest

from swarm.errors import HandshakeFailed
from swarm.net.noise import MESSAGE_1_BYTES, MESSAGE_2_BYTES, ChannelKey, Handshake, prologue

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


# Noise_IKpsk1_25519_AESGCM_SHA256 from the vectors of cacophony.
PRIVATE_INITIATOR_STATIC = "e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1"
PRIVATE_RESPONDER_STATIC = "4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893"
PRIVATE_INITIATOR_EPHEMERAL = "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a"
PRIVATE_RESPONDER_EPHEMERAL = "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b"
PRIVATE_PSK = "54686973206973206d7920417573747269616e20706572737065637469766521"
PRIVATE_HASH = "60b2cc6a78e5c5170469bf6be88f6f083363113fe4216b791f04c79659884185"
PRIVATE_MESSAGE_1 = (
    "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944cf5aec5a69cc937598c005d3f36940abe166f1eab777e15d"
    "8958d533d2d5eca2967c66cfc0788d6197989cac53ecb8e9cb04a2ff8bdf3a9d2bf1897b492c84639583c5486e0205e4012ac81400e569cb"
)
PRIVATE_MESSAGE_2 = (
    "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
    "746e1ca9059ed09501f41b1c01dd32378315c2d754bdc29ced08b435f05259"
)


@pytest.mark.filterwarnings("ignore:One of ephemeral keypairs:UserWarning")
def test_a_private_handshake_matches_the_published_vector():
    psk, spoken = bytes.fromhex(PRIVATE_PSK), b"John Galt"
    ours, theirs = (ChannelKey(bytes.fromhex(key)) for key in (PRIVATE_INITIATOR_STATIC, PRIVATE_RESPONDER_STATIC))
    ephemerals = (bytes.fromhex(key) for key in (PRIVATE_INITIATOR_EPHEMERAL, PRIVATE_RESPONDER_EPHEMERAL))
    initiator = Handshake(ours, spoken, theirs.public, psk=psk, ephemeral=next(ephemerals))
    responder = Handshake(theirs, spoken, None, psk=psk, ephemeral=next(ephemerals))
    message_1 = initiator.write(b"Ludwig von Mises")
    assert message_1.hex() == PRIVATE_MESSAGE_1
    assert responder.read(message_1) == b"Ludwig von Mises"
    message_2 = responder.write(b"Murray Rothbard")
    assert message_2.hex() == PRIVATE_MESSAGE_2
    assert initiator.read(message_2) == b"Murray Rothbard"
    assert initiator.finish().handshake_hash.hex() == responder.finish().handshake_hash.hex() == PRIVATE_HASH


@pytest.mark.parametrize(("theirs", "ours"), [(b"a", b"b"), (None, b"b"), (b"a", None)])
def test_without_the_networks_key_the_first_message_is_rejected(theirs: bytes | None, ours: bytes | None):
    responder_key = ChannelKey()
    psks = [None if key is None else key * 32 for key in (theirs, ours)]
    message = Handshake(ChannelKey(), prologue("public"), responder_key.public, psk=psks[0]).write()
    with pytest.raises(HandshakeFailed, match="network key"):
        Handshake(responder_key, prologue("public"), None, psk=psks[1]).read(message)


def test_private_messages_have_the_sizes_that_channels_wait_for():
    key = ChannelKey()
    initiator, responder = (Handshake(k, b"", r, psk=b"p" * 32) for k, r in ((ChannelKey(), key.public), (key, None)))
    message_1 = initiator.write()
    responder.read(message_1)
    assert (len(message_1), len(responder.write())) == (MESSAGE_1_BYTES, MESSAGE_2_BYTES)
