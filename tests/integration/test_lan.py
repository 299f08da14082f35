"""Servers and clients on one bridge find each other without any address: real processes, a network namespace each."""

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop
from transformers import AutoModelForCausalLM

from swarm.access import EVERYBODY
from swarm.demo import local as cold
from swarm.demo.local import LocalProcess, Place
from swarm.dht.directory import Directory
from swarm.dht.node import NodeConfig, open_node
from swarm.net.lan import Sought, browse
from swarm.net.p2p import P2PConfig
from tests.support import warm
from tests.support.bridge import Host, Wire, add_ipv6, bridge, change_address, why_not
from tests.support.swarms import DEMO_CHECKPOINT, environment, eventually

PROMPT = [[3, 14, 15, 92, 65, 35]]
NEW_TOKENS = 12
slow = pytest.mark.slow("servers start, each a process that loads half a model")


@dataclass(slots=True)
class Lan:
    """Hosts, and the processes on them."""

    hosts: list[Host]
    wire: Wire
    folder: Path
    processes: list[LocalProcess] = field(default_factory=list)

    def start(self, host: int, module: str, *arguments: str) -> LocalProcess:
        """Start a command on a host, by its number from 0; `wait_ready` waits for it."""
        name = f"{len(self.processes)}"
        place = Place(self.folder, namespace=self.hosts[host].namespace)
        env = {**os.environ, **environment(self.folder / name)}
        if module in {"swarm.dht.cli", "swarm.server.cli"}:
            arguments = (*arguments, "--identity", str(self.folder / f"{name}.identity"))
        launching = cold.launch if module == "swarm.monitor.cli" else warm.launch  # it cannot be beside hivemind
        self.processes.append(LocalProcess(name, module, arguments, place, env, launching))
        return self.processes[-1]

    def serve(self, host: int, blocks: str, *arguments: str) -> LocalProcess:
        options = ("--blocks", blocks, "--threads", "1", "--dtype", "float32", *arguments)
        return self.start(host, "swarm.server.cli", str(DEMO_CHECKPOINT), *options)

    def generate(self, host: int, network: str = "public", key: str = "", **env: str) -> dict[str, Any]:
        """Generate on a host, by `from_pretrained` without initial peers. Returns what the client printed."""
        arguments = (str(DEMO_CHECKPOINT), network, key, json.dumps(PROMPT), str(NEW_TOKENS))
        printed: dict[str, Any] = json.loads(
            self.printed(host, "tests.support.lan_client", *arguments, **env).splitlines()[-1]
        )
        return printed

    def printed(self, host: int, module: str, *arguments: str, **env: str) -> str:
        """Run a command on a host to its end. Returns all that it printed."""
        log = self.folder / f"{module}-{time.monotonic_ns()}.log"
        place = Place(self.folder, namespace=self.hosts[host].namespace)
        with log.open("wb") as file:
            process = warm.launch(place, module, arguments, {**os.environ, **environment(self.folder), **env}, file)
        try:
            process.wait(60.0)
            return log.read_text()
        finally:
            process.kill()

    def hear(self, host: int, network: str = "public") -> tuple[str, ...]:
        """Look for servers on a host."""
        with self.hosts[host].entered():
            return uvloop.run(browse(Sought.of(network, EVERYBODY), 2.0, [self.hosts[host].at]))

    def stop(self) -> None:
        for process in self.processes:
            process.ask_to_stop()
        for process in self.processes:
            process.stop()


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], "Lan"]]:
    """Make networks of so many hosts. They end with the module."""
    if why := why_not():
        pytest.skip(why)
    lans: list[Any] = []

    def make(hosts: int) -> Lan:
        made = bridge(hosts)
        lan = Lan(*made.__enter__(), tmp_path_factory.mktemp("lan"))
        lans.append((made, lan))
        return lan

    try:
        yield make
    finally:
        for made, lan in lans:
            lan.stop()
            made.__exit__(None, None, None)


@pytest.fixture(scope="module")
def halves(make: Callable[[int], Lan]) -> Lan:
    """Two servers, each with a half of the model and no initial peers, which started at the same moment."""
    lan = make(4)
    for server in [lan.serve(0, "0:6"), lan.serve(1, "6:12")]:
        server.wait_ready()
    return lan


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(DEMO_CHECKPOINT, dtype=torch.float32).eval()
    made: list[list[int]] = model.generate(torch.tensor(PROMPT), max_new_tokens=NEW_TOKENS, do_sample=False).tolist()
    return made


@slow
def test_third_host_generates_without_any_address(halves: Lan, expected: list[list[int]]) -> None:
    printed = halves.generate(2)
    assert printed.get("tokens") == expected, printed
    assert printed["took_s"] < 15.0


def events(process: LocalProcess) -> list[str]:
    """What a process has logged."""
    return [json.loads(line)["event"] for line in process.log.read_text().splitlines() if line.startswith("{")]


@slow
def test_servers_that_start_together_are_one_swarm(halves: Lan) -> None:
    for server in halves.processes[:2]:
        with halves.hosts[2].entered():
            assert uvloop.run(servers_known(server.ready)) == 2


async def servers_known(ready: dict[str, Any]) -> int:
    """The number of servers of the model that a client learns of through one server alone."""
    (address,) = (each for each in ready["addresses"] if "/10.78." in each)
    config = NodeConfig("public", P2PConfig(identity=None, listen=None), (address,))
    async with open_node(config, clock=time.time) as node:
        directory = Directory(node, identity=None, network="public", clock=time.time)
        return len(await directory.servers(ready["root"], 12))


@pytest.mark.long
def test_other_networks_and_keys_find_nothing(halves: Lan) -> None:
    key = halves.folder / "network.key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    for network, file in (("other", ""), ("public", str(key))):
        assert f"no server of swarm '{network}' was found" in halves.generate(2, network, file)["error"]


@pytest.mark.long
def test_generate_finds_the_servers(halves: Lan) -> None:
    options = ("--prompt", "def f(", "--max-new-tokens", "4", "--dtype", "float32")
    assert "def f(" in halves.printed(3, "swarm.client.cli", str(DEMO_CHECKPOINT), *options)


@slow
@pytest.mark.long
@pytest.mark.parametrize(("module", "path"), [("swarm.gateway.cli", "/readyz"), ("swarm.monitor.cli", "/api/v1/state")])
def test_web_commands_find_the_servers(halves: Lan, module: str, path: str) -> None:
    models = ("--model", str(DEMO_CHECKPOINT), "--dtype", "float32") if "gateway" in module else ()
    data = ("--database", str(halves.folder / "health.sqlite")) if "monitor" in module else ()
    command = halves.start(3, module, *models, *data, "--listen", "127.0.0.1:0").wait_ready()
    assert str(DEMO_CHECKPOINT.name) in get(halves.hosts[3], command.ready["url"] + path)


def get(host: Host, url: str) -> str:
    """Read a page from a host's own loopback."""
    with host.entered(), urllib.request.urlopen(url, timeout=10.0) as response:
        text: str = response.read().decode()
        return text


@pytest.mark.long
def test_server_that_comes_later_joins_the_first(make: Callable[[int], Lan]) -> None:
    lan = make(2)
    first = lan.start(0, "swarm.dht.cli", "--network", "mine")
    first.wait_ready()
    assert "first on this network; others on it find this server by themselves" in events(first)
    second = lan.start(1, "swarm.dht.cli", "--network", "mine")
    second.wait_ready()
    assert "found 1 peer on this network: 10.78.0.1:31337" in events(second)


@pytest.mark.long
def test_server_at_a_new_address_is_found_there(make: Callable[[int], Lan]) -> None:
    lan = make(2)
    lan.start(0, "swarm.dht.cli").wait_ready()
    (before,) = lan.hear(1)
    assert before.startswith("/ip4/10.78.0.1/tcp/31337/p2p/12D3KooW")
    lan.hosts[0] = change_address(lan.hosts[0], IPv4Interface("10.78.0.77/24"))
    after = before.replace("10.78.0.1", "10.78.0.77")
    eventually(lambda: lan.hear(1) == (after,), 20.0)


@pytest.mark.long
@pytest.mark.parametrize("alone", [True, False], ids=["ipv6 alone", "dual stack"])
def test_swarm_on_ipv6_generates(make: Callable[[int], Lan], expected: list[list[int]], alone: bool) -> None:
    """Where IPv6 is alone, there is no IPv4 even on loopback. mDNS announces IPv4 only, so a peer is named."""
    lan = make(3)
    addresses = [add_ipv6(host, alone=alone) for host in lan.hosts]
    first = lan.start(0, "swarm.dht.cli", "--no-lan").wait_ready()
    (way_in,) = (each for each in first.ready["addresses"] if addresses[0] in each)
    servers = [lan.serve(at, blocks, "--no-lan", "--initial-peers", way_in) for at, blocks in ((0, "0:6"), (1, "6:12"))]
    for at, server in enumerate(servers):
        told = server.wait_ready().log.read_text()
        assert f"[{addresses[at]}]:" in told
        families = {each.split("/")[1] for each in server.ready["addresses"]}
        assert families == ({"ip6"} if alone else {"ip4", "ip6"})
    printed = lan.generate(2, SWARM_INITIAL_PEERS=way_in)
    assert printed.get("tokens") == expected, printed


def a_server(lan: Lan, blocks: str) -> tuple[LocalProcess, LocalProcess, str]:
    """A bootstrap node on the first host, a server that starts on the second one, and the way in."""
    boot = lan.start(0, "swarm.dht.cli", "--no-lan").wait_ready()
    (way_in,) = (each for each in boot.ready["addresses"] if "/10.78." in each)
    return boot, lan.serve(1, blocks, "--no-lan", "--initial-peers", way_in), way_in


@pytest.mark.long
def test_server_that_moves_before_it_is_online_is_found_where_it_is(
    make: Callable[[int], Lan], expected: list[list[int]]
) -> None:
    lan = make(3)
    boot, server, way_in = a_server(lan, "0:12")
    eventually(lambda: "listening" in events(server), 30.0)
    os.kill(boot.ready["pid"], signal.SIGSTOP)  # so that no node answers the server, and it cannot be online yet
    lan.hosts[1] = change_address(lan.hosts[1], IPv4Interface("10.78.0.77/24"))
    eventually(lambda: "this machine has moved or slept" in events(server), 30.0)
    assert not server.is_ready()
    os.kill(boot.ready["pid"], signal.SIGCONT)
    server.wait_ready()
    assert lan.generate(2, SWARM_INITIAL_PEERS=way_in).get("tokens") == expected
    assert "10.78.0.77:31330" in server.log.read_text()


@pytest.mark.long
def test_second_address_replaces_no_p2pd_and_a_lost_one_does(make: Callable[[int], Lan]) -> None:
    lan = make(2)
    _, server, _ = a_server(lan, "0:1")
    server.wait_ready()

    def seen(moves: int) -> bool:
        return events(server).count("this machine has moved or slept") == moves

    change_address(lan.hosts[1], IPv4Interface("10.78.0.78/24"), keep=True)
    eventually(lambda: seen(1), 10.0)
    change_address(lan.hosts[1], IPv4Interface("10.78.0.79/24"))
    eventually(lambda: seen(2) and "p2pd is replaced" in events(server), 10.0)
    assert events(server).count("p2pd is replaced") == 1


@pytest.mark.long
def test_no_lan_puts_nothing_on_the_wire(make: Callable[[int], Lan]) -> None:
    lan = make(1)
    lan.serve(0, "0:1", "--no-lan").wait_ready()
    lan.start(0, "swarm.dht.cli", "--no-lan").wait_ready()
    lan.start(0, "swarm.dht.cli", "--listen", "0.0.0.0:4001", "--announce-address", "8.8.8.8:4001").wait_ready()
    lan.start(0, "swarm.dht.cli", "--listen", "127.0.0.1:4002").wait_ready()
    assert lan.wire.mdns() == [], "refused twice, then a public swarm, then loopback"
    lan.start(0, "swarm.dht.cli", "--listen", "0.0.0.0:4003").wait_ready()
    assert any(b"_swarm" in packet for packet in lan.wire.mdns()), "else nothing was seen"
