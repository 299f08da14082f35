"""A private swarm of processes: members generate, strangers do not get in."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarm.client.session.limits import RecoveryLimits, SessionLimits
from swarm.errors import NoRoute, SwarmError
from swarm.identity import Identity
from tests.support import warm
from tests.support.often import rest_is_long
from tests.support.swarms import World, environment, prompt, world

SAME = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "network.key"
    subprocess.run(["sh", "-c", f"(umask 077; openssl rand -hex 32 > {path})"], check=True)
    return path


@pytest.fixture(scope="module")
def private(checkpoint: Callable[[str], Path], home: Path, key: Path) -> Iterator[World]:
    with world(checkpoint("llama"), home, env={"SWARM_NETWORK_KEY": str(key)}) as running:
        yield running


def test_a_member_generates(private: World, key: Path) -> None:
    ids = prompt(1, 6)
    got = private.client(network_key=key).generate(ids, **SAME)
    assert got.equal(private.full.generate(ids, **SAME))


@pytest.mark.parametrize("has", rest_is_long(["no key", "another key"], ["no key"]))
def test_a_stranger_finds_nobody(private: World, has: str, tmp_path: Path) -> None:
    path = None
    if has == "another key":
        path = tmp_path / "other.key"
        path.write_text("ab" * 32)
        path.chmod(0o600)
    with pytest.raises(NoRoute, match="0:6"):
        private.client(network_key=path).generate(prompt(1, 6), **SAME)


@pytest.mark.parametrize("command", ["swarm.server.cli", "swarm.dht.cli", "swarm.client.cli"])
def test_a_command_without_its_key_file_says_how_to_make_one(command: str, tmp_path: Path, home: Path) -> None:
    model = () if command == "swarm.dht.cli" else (str(tmp_path),)
    more = ("--blocks", "0:1") if command == "swarm.server.cli" else ("--prompt", "x")
    line = (*model, *(more if model else ()), "--network-key", str(tmp_path / "network.key"))
    peers = ("--initial-peers", f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}") if model else ()
    own = () if command == "swarm.client.cli" else ("--identity", str(tmp_path / "identity"))
    ended, printed = warm.start(tmp_path, command, *line, *peers, *own, env=environment(home)).ended()
    assert ended == 2
    (error,) = printed.splitlines()
    assert f"openssl rand -hex 32 > {tmp_path}" in error


@pytest.mark.long
def test_servers_with_a_list_serve_the_peers_on_it(
    checkpoint: Callable[[str], Path], home: Path, tmp_path: Path
) -> None:
    members = {name: Identity.generate() for name in ("bootstrap", "server-0", "server-1", "client")}
    peers = tmp_path / "peers"
    peers.write_text("\n".join(f"{identity.peer_id}  # {name}" for name, identity in members.items()))
    members["client"].save(tmp_path / "client.identity")
    limits = SessionLimits(recovery=RecoveryLimits(holders_s=1.0))  # those that refuse are asked again
    spans, env = ("0:3", "3:6"), {"SWARM_ALLOW_PEERS": str(peers)}
    with world(checkpoint("llama"), home, spans, env=env, identities=members) as running:
        ids = prompt(1, 6)
        listed = running.client(allow_peers=peers, identity=tmp_path / "client.identity")
        assert listed.generate(ids, **SAME).equal(running.full.generate(ids, **SAME))
        with pytest.raises(SwarmError, match="list of allowed peers that this side is not on"):
            running.client(limits=limits).generate(ids, **SAME)
