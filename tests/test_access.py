"""The files of a private swarm: what is wrong with one is said, with what to do."""

from pathlib import Path

import pytest

from swarm.access import EVERYBODY, Access, NetworkKey
from swarm.errors import BadConfiguration
from swarm.identity import Identity

ALICE, BOB = (Identity(name * 32) for name in (b"a", b"b"))


def key_file(folder: Path, text: str = "ab" * 32 + "\n", mode: int = 0o600) -> Path:
    path = folder / "network.key"
    path.write_text(text)
    path.chmod(mode)
    return path


def list_file(folder: Path, text: str) -> Path:
    path = folder / "peers"
    path.write_text(text)
    return path


def test_a_missing_key_file_comes_with_the_command_that_makes_one(tmp_path: Path) -> None:
    path = tmp_path / "network.key"
    with pytest.raises(BadConfiguration, match=r"no such file.*umask 077; openssl rand -hex 32 > .*network\.key"):
        NetworkKey.load(path)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="chmod 600"):
        NetworkKey.load(key_file(tmp_path, mode=0o640))


@pytest.mark.parametrize("text", ["", "ab" * 31, "ab" * 33, "xy" * 32, "\xff" * 64])
def test_what_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadConfiguration, match="64 hex digits"):
        NetworkKey.load(key_file(tmp_path, text))


def test_each_purpose_has_a_key_of_its_own_and_none_is_the_secret(tmp_path: Path) -> None:
    key = NetworkKey.load(key_file(tmp_path))
    derived = {key.derive("one"), key.derive("two"), key.secret}
    assert len(derived) == 3
    assert key.derive("one") == NetworkKey(bytes.fromhex("ab" * 32)).derive("one")
    assert "abab" not in repr(Access(key))


def test_a_list_has_a_peer_in_a_line_and_remarks(tmp_path: Path) -> None:
    path = list_file(tmp_path, f"# members\n\n{ALICE.peer_id}  # Alice\n  {BOB.peer_id}\n")
    access = Access.load(None, path)
    assert access.allowed == {ALICE.peer_id, BOB.peer_id}
    assert access.admits(ALICE.peer_id)
    assert not access.admits(Identity.generate().peer_id)
    assert EVERYBODY.admits(ALICE.peer_id)


def test_an_empty_list_admits_nobody(tmp_path: Path) -> None:
    assert not Access.load(None, list_file(tmp_path, "")).admits(ALICE.peer_id)


def test_a_line_that_is_no_peer_id_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="line 2: 'mallory'"):
        Access.load(None, list_file(tmp_path, f"{ALICE.peer_id}\nmallory\n"))


def test_whoever_is_not_on_its_own_list_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match=f"add {BOB.peer_id}"):
        Access.load(None, list_file(tmp_path, ALICE.peer_id), own=BOB.peer_id)


def test_a_missing_list_is_no_open_door(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="No such file"):
        Access.load(None, tmp_path / "peers")
