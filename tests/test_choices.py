"""What a command takes where nothing was named. Real processes do it in tests/integration/test_beside.py."""

from contextlib import ExitStack
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from swarm import config
from swarm.choices import ChoiceLimits, hold_identity, listen_option
from swarm.errors import BadConfiguration, IdentityInUse


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(config, "DATA_DIR", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "env", "expected"),
    [
        ([], {}, ("::", range(31330, 31330 + 10 * ChoiceLimits().tries_max, 10))),
        (["--listen", "[::]:31330"], {}, ("::", 31330)),
        ([], {"SWARM_LISTEN": "[::]:31330"}, ("::", 31330)),
        (["--listen", "127.0.0.1:0"], {}, ("127.0.0.1", 0)),
    ],
)
def test_only_a_port_that_was_not_named_is_chosen(
    arguments: list[str], env: dict[str, str], expected: tuple[str, int | range]
) -> None:
    got: list[object] = []

    @click.command()
    @listen_option("--listen", "[::]:31330", "for activations")
    def command(listen: tuple[str, int | range]) -> None:
        got.append(listen)

    done = CliRunner().invoke(command, arguments, env=env, auto_envvar_prefix="SWARM")
    assert (done.exit_code, got) == (0, [expected]), done.output


def test_first_identity_that_is_not_held_is_taken(folder: Path) -> None:
    with ExitStack() as first, hold_identity(None, "server") as (path, identity):
        second, other = first.enter_context(hold_identity(None, "server"))
        third, _ = first.enter_context(hold_identity(None, "server"))
        assert [each.name for each in (path, second, third)] == [
            "server.identity",
            "server-2.identity",
            "server-3.identity",
        ]
        assert {each.parent for each in (path, second, third)} == {folder}
        assert identity.peer_id != other.peer_id
        first.close()
        with hold_identity(None, "server") as (again, same):
            assert (again, same.peer_id) == (second, other.peer_id)


def test_identity_that_is_named_is_held_once(folder: Path) -> None:
    named = folder / "own.key"
    with (
        hold_identity(named, "server") as (path, _),
        pytest.raises(IdentityInUse, match=r"own\.key"),
        hold_identity(named, "server"),
    ):
        raise AssertionError
    assert path == named
    assert not list(folder.glob("server*"))


def test_identities_come_to_an_end() -> None:
    with ExitStack() as all_of_them:
        for _ in range(ChoiceLimits().tries_max):
            all_of_them.enter_context(hold_identity(None, "server"))
        with pytest.raises(IdentityInUse, match=r"server\.identity"), hold_identity(None, "server"):
            raise AssertionError


def test_damaged_identity_is_not_passed_over(folder: Path) -> None:
    (folder / "server.identity").write_bytes(b"no key")
    (folder / "server.identity").chmod(0o600)
    with pytest.raises(BadConfiguration, match=r"server\.identity"), hold_identity(None, "server"):
        raise AssertionError
