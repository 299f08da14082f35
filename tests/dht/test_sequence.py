"""Sequence numbers over restarts."""

from pathlib import Path

from swarm.dht.directory import Directory
from swarm.dht.sequence import Sequence, SequenceInFile
from swarm.dht.store import MemoryStore
from swarm.identity import Identity
from tests.dht.support import NETWORK, ROOT, announcement

ALICE = Identity(b"a" * 32)
NOW = 1_800_000_000.0
HOUR = 3_600_000  # milliseconds


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


async def announced(store: MemoryStore, clock: Clock, sequence: Sequence, load: float) -> float:
    """Announce as a process with this clock, and return the load that others read."""
    server = Directory(store, identity=ALICE, network=NETWORK, clock=clock, sequence=sequence)
    await server.announce(announcement(ALICE, load=load))
    reader = Directory(store, identity=None, network=NETWORK, clock=store.gate.clock)
    (found,) = await reader.servers(ROOT, 12)
    return found.announcement.load


async def test_a_restarted_servers_record_supersedes_its_last_though_the_clock_went_back(tmp_path: Path) -> None:
    store, clock, path = MemoryStore.make(NETWORK, Clock()), Clock(), tmp_path / "sequence"
    assert await announced(store, clock, SequenceInFile(path), 1.0) == 1.0
    clock.now -= 20
    assert await announced(store, clock, SequenceInFile(path), 2.0) == 2.0
    assert await announced(store, clock, SequenceInFile(path), 3.0) == 3.0


def test_numbers_follow_the_clock_and_always_grow(tmp_path: Path) -> None:
    sequence = SequenceInFile(tmp_path / "sequence")
    moments = (NOW, NOW, NOW - 5, NOW + 20, NOW + 2 * HOUR / 1000)
    numbers = [sequence.next(moment) for moment in moments]
    assert numbers == sorted(set(numbers))
    assert numbers[0] == NOW * 1000
    assert numbers[-1] == NOW * 1000 + 2 * HOUR
    assert SequenceInFile(tmp_path / "sequence").next(NOW) > numbers[-1]


def test_the_file_is_written_once_an_hour(tmp_path: Path) -> None:
    path = tmp_path / "sequence"
    sequence, texts = SequenceInFile(path), set()
    for second in range(0, 2 * HOUR // 1000, 20):
        sequence.next(NOW + second)
        texts.add(path.read_text())
    assert len(texts) == 2


def test_a_damaged_or_unwritable_file_leaves_the_clock(tmp_path: Path) -> None:
    for content in (b"", b"x", b"9" * 30, b"\xff\xfe"):
        (tmp_path / "sequence").write_bytes(content)
        assert SequenceInFile(tmp_path / "sequence").next(NOW) == NOW * 1000
    assert SequenceInFile(tmp_path / "nowhere" / "sequence").next(NOW) == NOW * 1000
