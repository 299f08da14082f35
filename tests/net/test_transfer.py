"""The two ends of a move, as values: whatever the carriers do, each end's bytes arrive once and in their order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import FrameRejected
from swarm.net.transfer import MoveSecrets, Transfer

SECRETS = MoveSecrets(b"o" * 32, b"f" * 32)


class End:
    """One end with its two carriers. It writes numbered bytes, so that a lost or doubled one shows."""

    def __init__(self, first: bool, sent: int, received: int) -> None:
        self.first, self.sent, self.wrote = first, sent, bytearray()
        self.transfer: Transfer | None = None
        self.received = received
        self.got = bytearray()
        self.old, self.new = bytearray(), bytearray()  # that are on their way to the other end
        self.new_is_open = self.old_is_open = True

    def write(self, count: int) -> None:
        data = bytes((len(self.wrote) + i) % 251 for i in range(count))
        self.wrote += data
        if self.transfer is not None and self.transfer.departed:
            self.new += data
        else:
            self.old += data
            self.sent += count

    def begin(self) -> None:
        self.transfer = Transfer(SECRETS, self.received, first=self.first, peer="the other")
        self.settle()

    def settle(self) -> None:
        if self.transfer is not None and self.transfer.must_depart:
            self.new += self.transfer.depart(self.sent)

    def take(self, carrier: str, data: bytes) -> None:
        if self.transfer is None:
            assert carrier == "old"
            self.received += len(data)
            self.got += data
            return
        self.got += self.transfer.take_old(data) if carrier == "old" else self.transfer.take_new(data)
        self.settle()


ACTIONS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(("write", "old", "new", "begin")), st.integers(1, 60)), max_size=80
)


def play(ends: tuple[End, End], actions: list[tuple[int, str, int]]) -> None:
    for which, action, count in actions:
        end, other = ends[which], ends[1 - which]
        match action:
            case "write":
                end.write(count)
            case "begin" if end.transfer is None and (not end.first or other.transfer is not None):
                end.begin()
            case "old" | "new" if not (action == "new" and end.transfer is None):
                way = getattr(other, action)
                data, way[:] = bytes(way[:count]), way[count:]
                end.take(action, data)
            case _:
                continue
        if end.transfer is not None and end.transfer.is_free:  # it may end the old carrier: nothing is on it
            assert not end.old
            assert not other.old


@given(ACTIONS, st.integers(0, 1000), st.integers(0, 1000))
def test_each_byte_arrives_once_and_in_order(actions, before, back):
    ends = End(True, before, back), End(False, back, before)
    play(ends, actions)
    rest = [(1, "begin", 1), (0, "begin", 1), (0, "write", 5), (1, "write", 5)]
    rest += [(which, way, 5000) for _ in range(3) for which in (0, 1) for way in ("new", "old")]
    play(ends, rest)
    for end, other in (ends, ends[::-1]):
        assert bytes(end.got) == bytes(other.wrote)
        assert end.transfer.over
        assert other.transfer.departed


@given(ACTIONS, st.integers(0, 1), st.booleans())
def test_a_lost_carrier_loses_nothing_or_ends_the_channel(actions, which, old):
    """The bytes on the lost carrier never arrive: so a channel that goes on must have had none there."""
    ends = End(True, 0, 0), End(False, 0, 0)
    play(ends, actions)
    end, other = ends[which], ends[1 - which]
    if end.transfer is None:
        return
    match end.transfer.lost(old=old):
        case "goes on":
            assert old
            assert not other.old  # all that the peer has sent there is read
        case "stays":
            assert not old
            assert not end.transfer.departed
            assert bytes(end.got) == bytes(other.wrote[: len(end.got)])


def test_only_the_end_that_has_dialled_may_free_the_old_carrier():
    ends = End(True, 0, 0), End(False, 0, 0)
    play(ends, [(1, "begin", 1), (0, "begin", 1), (1, "new", 99), (0, "new", 99)])
    assert [end.transfer.over for end in ends] == [True, True]
    assert [end.transfer.is_free for end in ends] == [True, False]


@pytest.mark.parametrize("mark", [
    b"\0" * 40,
    SECRETS.mark(0, first=False),  # its own, reflected
    MoveSecrets(b"o" * 32, b"g" * 32).mark(0, first=True),  # of another connection
    (1).to_bytes(8, "big") + SECRETS.mark(0, first=True)[8:],
])  # fmt: skip
def test_a_mark_of_another_move_is_refused_and_the_channel_stays(mark):
    end = Transfer(SECRETS, 0, first=False, peer="the other")
    with pytest.raises(FrameRejected, match="no mark"):
        end.take_new(mark)
    assert end.lost(old=False) == "stays"


def test_bytes_behind_the_position_of_the_old_carrier_are_refused():
    end = Transfer(SECRETS, 5, first=False, peer="the other")
    end.take_new(SECRETS.mark(7, first=True))
    assert end.take_old(b"ab") == b"ab"
    with pytest.raises(FrameRejected, match="more"):
        end.take_old(b"c")
    late = Transfer(SECRETS, 8, first=False, peer="the other")
    with pytest.raises(FrameRejected, match="more"):
        late.take_new(SECRETS.mark(7, first=True))


def test_proofs_differ_by_end_and_channel():
    others = [MoveSecrets(b"p" * 32, b"f" * 32), MoveSecrets(b"o" * 32, b"g" * 32)]
    proofs = [each.proof(first=first) for each in (SECRETS, *others) for first in (True, False)]
    assert len(set(proofs)) == 6


def test_the_new_carrier_waits_while_bytes_are_missing_on_the_old_one():
    """So what waits is bounded by what a carrier reads at once."""
    end = Transfer(SECRETS, 5, first=False, peer="the other")
    assert end.wants_new
    assert end.take_new(SECRETS.mark(7, first=True) + b"cd") == b""
    assert not end.wants_new
    assert end.take_old(b"ab") == b"abcd"
    assert end.wants_new
