"""Names of sessions: whose they are shows."""

from swarm.identity import Identity
from swarm.protocol.naming import is_name_of, new_name


def test_a_name_is_its_owners_and_nobody_elses() -> None:
    owner, other = (Identity.generate().peer_id for _ in range(2))
    names = {new_name(owner) for _ in range(100)}
    assert len(names) == 100
    for name in names:
        assert len(name) == 32
        assert is_name_of(owner, name)
        assert not is_name_of(other, name)


def test_a_name_that_was_changed_anywhere_is_nobodys() -> None:
    owner = Identity.generate().peer_id
    name = bytes.fromhex(new_name(owner))
    for bit in range(8 * len(name)):
        changed = bytearray(name)
        changed[bit // 8] ^= 1 << bit % 8
        assert not is_name_of(owner, changed.hex())
