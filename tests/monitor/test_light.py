"""The light reader against real nodes: it finds what is announced and believes nothing that is not signed and alive."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from swarm.access import Access
from swarm.dht.directory import Directory
from swarm.dht.node import NodeConfig, SwarmNode, open_node
from swarm.dht.records import key_id, span_key, span_subkey
from swarm.dht.validator import Entry, Facts, Place
from swarm.identity import Identity
from swarm.net.p2p import P2PConfig
from tests.dht.support import LOOPBACK, NETWORK, ROOT, announcement, node, signed
from tests.monitor import needs_light

pytestmark = needs_light


async def read(*peers: str, **env: str) -> dict[str, Any]:
    """Run a light reader in a process of its own."""
    return await printed("tests.monitor.read_light", NETWORK, ROOT, "12", *peers, **env)


async def printed(module: str, *arguments: str, **env: str) -> dict[str, Any]:
    """Run a module in a process of its own; return the JSON that it prints."""
    line = [sys.executable, "-m", module, *arguments]
    child = await asyncio.create_subprocess_exec(
        *line, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, **env}
    )
    async with asyncio.timeout(60):
        out, err = await child.communicate()
    assert child.returncode == 0, err.decode()
    return json.loads(out.splitlines()[-1])  # events come before


def plant(into: SwarmNode, data: bytes, public_key: str, expires: float) -> None:
    """Put bytes into a node's storage past its gate, as a node that lies would."""
    place = Place(key_id(span_key(NETWORK, ROOT)), span_subkey(public_key, (0, 4)), time.time() * 1000)
    facts = Facts(public_key, time.time(), expires, place, place)
    into.storage.put(Entry(data, facts, place))


async def test_it_finds_what_is_announced_on_nodes_that_it_was_not_told_of(tmp_path: Path):
    me = Identity.generate()
    async with (
        node(tmp_path, "first") as first,
        node(tmp_path, "second", first.addresses) as second,
        node(tmp_path, "third", second.addresses, identity=me) as third,
    ):
        directory = Directory(third, identity=me, network=NETWORK, clock=time.time)
        await directory.announce(announcement(me, public_name="<b>bold</b>"))
        first.storage._keys.clear()  # so that it has to ask the others
        found = await read(*first.addresses[:1])
    assert found == {"models": ["org/model"], "servers": ["<b>bold</b>"], "heavy": []}


async def test_forged_expired_and_malformed_records_never_show(tmp_path: Path):
    good, bad = Identity.generate(), Identity.generate()
    owner, now = bad.public_key.hex(), time.time()
    true = signed(bad, public_name="true")
    expired = signed(bad, now=now - 61, public_name="expired")
    future = signed(bad, now=now + 300, public_name="future")
    others = signed(bad, network="elsewhere", public_name="elsewhere")
    async with node(tmp_path, "liar") as liar:
        facts = liar.gate.facts(signed(good, public_name="good"))
        assert liar.storage.put(Entry(signed(good, public_name="good"), facts, facts.span)) is True
        for i, data in enumerate(
            (
                true[:70] + bytes([true[70] ^ 1]) + true[71:],  # its payload was changed
                bytes(64) + true[64:],  # not signed
                expired,
                future,
                others,
                b"\xff" * 300,
                true + b" ",  # not canonical
            )
        ):
            plant(liar, data, f"{i:02x}" + owner[2:], now + 50)
        found = await read(*liar.addresses[:1])
    assert found["servers"] == ["good"]


@pytest.mark.long
async def test_a_swarm_that_cannot_be_reached_is_an_error_with_a_name():
    peer = Identity.generate().peer_id
    assert await read(f"/ip4/127.0.0.1/tcp/1/p2p/{peer}") == {"error": "Unreachable"}
    assert await read("/ip4/127.0.0.1/nonsense") == {"error": "BadConfiguration"}


@pytest.mark.long
async def test_a_clock_that_is_wrong_is_told_before_anything_is_read(tmp_path: Path):
    async with node(tmp_path, "late", clock=lambda: time.time() - 120) as late:
        assert await read(*late.addresses[:1]) == {"error": "ClockSkew"}


async def test_it_reads_a_private_swarm_with_the_key_and_nothing_without(tmp_path: Path):
    key, me = tmp_path / "network.key", Identity.generate()
    key.write_text("ab" * 32)
    key.chmod(0o600)
    access = Access.load(key, None)
    me.save(tmp_path / "identity")
    config = NodeConfig(NETWORK, P2PConfig(tmp_path / "identity", LOOPBACK), (), access)
    async with open_node(config, clock=time.time) as member:
        directory = Directory(member, identity=me, network=NETWORK, clock=time.time)
        await directory.announce(announcement(me, public_name="ours"))
        with_key, without = await read(*member.addresses, SWARM_NETWORK_KEY=str(key)), await read(*member.addresses)
    assert with_key == {"models": ["org/model"], "servers": ["ours"], "heavy": []}
    assert without == {"models": [], "servers": [], "heavy": []}


@pytest.mark.long
async def test_reader_goes_on_when_libp2p_has_crashed(tmp_path: Path):
    me = Identity.generate()
    async with node(tmp_path, "first") as first, node(tmp_path, "second", first.addresses) as second:
        await Directory(second, identity=me, network=NETWORK, clock=time.time).announce(announcement(me))
        found = await printed("tests.monitor.restart_light", NETWORK, ROOT, *first.addresses[:1])
    assert found == {"found": [1, 1], "restarts": 1, "threads": [], "error": "Unreachable"}
