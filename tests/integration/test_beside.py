"""Several programs on one machine, none of which was told a port or an identity."""

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from swarm.demo import local as cold
from swarm.demo.local import LocalProcess, LocalSwarm, Place
from swarm.net.ports import has_ipv6
from tests.support import warm
from tests.support.often import rest_is_long
from tests.support.swarms import DEMO_CHECKPOINT, DEMO_SPANS, NETWORK, World, environment, join, prompt, world

DATA_PORTS, P2P_PORTS = range(31330, 31650, 10), range(31331, 31651, 10)
START_S = 60.0


@dataclass(slots=True)
class Machine:
    """One machine's servers: a home folder of its own, and the ports that are free."""

    world: World
    home: Path
    started: list[LocalProcess] = field(default_factory=list)

    def serve(self, blocks: str) -> LocalProcess:
        """Start a server with no option of where."""
        arguments = (str(DEMO_CHECKPOINT), "--blocks", blocks, "--network", NETWORK, "--threads", "1", *self.peers)
        number = len(self.started)
        server = LocalProcess(
            f"beside-{number}", "swarm.server.cli", arguments, Place(self.home), self.env, warm.launch
        )
        self.started.append(server)
        return server

    def run(self, module: str, *arguments: str) -> LocalProcess:
        """Start another command of the swarm, with no option of where."""
        name = f"beside-{len(self.started)}"
        launching = cold.launch if module == "swarm.monitor.cli" else warm.launch  # it cannot be beside hivemind
        line = (*arguments, "--network", NETWORK, *self.peers)
        self.started.append(LocalProcess(name, module, line, Place(self.home), self.env, launching))
        return self.started[-1]

    def refused(self, *arguments: str, **env: str) -> str:
        """Run a server that ends by itself, with code 2; return what it says."""
        line = (str(DEMO_CHECKPOINT), "--blocks", "0:1", "--network", NETWORK, *self.peers, *arguments)
        code, printed = warm.start(self.home, "swarm.server.cli", *line, env=self.env | env).ended(START_S)
        assert code == 2, printed
        return printed.splitlines()[-1]

    @property
    def env(self) -> dict[str, str]:
        return warm.own_variables() | environment(self.home) | {"HOME": str(self.home)}

    @property
    def peers(self) -> tuple[str, ...]:
        return ("--initial-peers", ",".join(self.world.swarm.initial_peers))

    def identity(self, number: int) -> Path:
        """The key file of the first server, the second, ..."""
        return self.home / "data" / "swarm" / (f"server-{number}.identity" if number > 1 else "server.identity")

    def stop(self) -> None:
        for server in self.started:
            server.ask_to_stop()
        for server in self.started:
            server.stop()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Three servers, started in the same moment."""
    home = tmp_path_factory.mktemp("machine")
    with world(DEMO_CHECKPOINT, home, spans=(), dtype=torch.bfloat16) as running, ExitStack() as closing:
        machine = Machine(running, home)
        closing.callback(machine.stop)
        for blocks in DEMO_SPANS:
            machine.serve(blocks)
        for server in machine.started:
            server.wait_ready()
        yield machine


def data_port(server: LocalProcess) -> int:
    return int(server.ready["data_address"].rpartition(":")[2])


def p2p_ports(server: LocalProcess) -> set[int]:
    return {int(address.split("/")[4]) for address in server.ready["addresses"]}


def told(server: LocalProcess) -> tuple[str, ...]:
    """The data port, the DHT's and the identity that a server says it has taken."""
    log = re.sub(r"\x1b\[\d*m", "", server.log.read_text())
    (line,) = (line for line in log.splitlines() if '"listening"' in line)
    found = [
        re.search(pattern, line) for pattern in (r'"at": ?"\S*:(\d+)"', r'"p2p_port": ?(\d+)', r'/([^/"]+)\.identity"')
    ]
    return tuple(each[1] for each in found if each is not None)


def generated(model: PreTrainedModel) -> list[list[int]]:
    tokens = model.generate(prompt(1, 8), max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    return tokens.tolist()  # type: ignore[no-any-return]


@pytest.mark.long
def test_servers_started_at_once_generate_together(machine: Machine) -> None:
    with machine.world.client() as model:
        ids = prompt(1, 8)
        got = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
        expected = machine.world.full.generate(
            ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        assert got.tolist() == expected.tolist()
        assert {hop.peer_id for hop in model.route} == {server.ready["peer_id"] for server in machine.started[:3]}


def test_each_server_tells_the_ports_and_identity_it_took(machine: Machine) -> None:
    servers = machine.started[:3]
    for server in servers:
        (p2p_port,) = p2p_ports(server)
        assert data_port(server) in DATA_PORTS
        assert p2p_port in P2P_PORTS
        assert told(server)[:2] == (str(data_port(server)), str(p2p_port))
    assert len({data_port(server) for server in servers}) == len({min(p2p_ports(server)) for server in servers}) == 3
    assert {told(server)[2] for server in servers} == {"server", "server-2", "server-3"}
    assert all(machine.identity(number).exists() for number in (1, 2, 3))


def test_server_that_starts_again_takes_what_it_had(machine: Machine) -> None:
    former = machine.started[1]
    former.stop()
    again = machine.serve(DEMO_SPANS[1]).wait_ready()
    assert told(again) == told(former)
    assert again.ready["peer_id"] == former.ready["peer_id"]


@pytest.mark.parametrize("option", ["--listen", "--p2p-listen"])
def test_port_that_was_named_is_not_replaced(machine: Machine, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        own = ("--identity", str(machine.home / "other.key"))
        assert at in machine.refused(option, at, *own)
        assert at in machine.refused(*own, **{"SWARM" + option.upper().replace("--", "_").replace("-", "_"): at})


def test_identity_that_was_named_is_not_replaced(machine: Machine) -> None:
    held = str(machine.identity(1))
    assert held in machine.refused("--identity", held)
    assert held in machine.refused(SWARM_IDENTITY=held)


def port_of(command: LocalProcess) -> int:
    """The port that a command has taken: of its page, or of its DHT."""
    if "url" in command.ready:
        return int(command.ready["url"].rpartition(":")[2])
    (port,) = p2p_ports(command)
    return port


COMMANDS = {
    "swarm.dht.cli": range(31337, 31657, 10),
    "swarm.gateway.cli": range(8000, 8032),
    "swarm.monitor.cli": range(8080, 8112),
}


@pytest.mark.slow("two processes start")
@pytest.mark.parametrize("module", rest_is_long(COMMANDS, ["swarm.gateway.cli"]))
def test_second_program_of_a_kind_takes_free_ports(machine: Machine, module: str) -> None:
    both = [machine.run(module) for _ in range(2)]
    ports = [port_of(each.wait_ready()) for each in both]
    assert len(set(ports)) == len(set(ports) & set(COMMANDS[module])) == 2
    for command, port in zip(both, ports, strict=True):
        (line,) = (line for line in command.log.read_text().splitlines() if '"ready"' in line)
        assert re.search(rf"[:/]{port}\b", line), "it tells its port"
        command.ask_to_stop()


@pytest.mark.parametrize(
    ("module", "option"), [*((module, "--listen") for module in COMMANDS), ("swarm.dht.cli", "--anchor-listen")]
)
def test_programs_named_port_is_not_replaced(machine: Machine, module: str, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        command = machine.run(module, option, at)
        assert command.process.wait(START_S) == 2
        assert command.log.read_text().splitlines()[-1].startswith(f"error: cannot listen on {at}: ")


@pytest.mark.long
@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_swarm_of_ipv6_alone_generates(machine: Machine) -> None:
    options = ("--dtype", "bfloat16")
    with (
        LocalSwarm(DEMO_CHECKPOINT, DEMO_SPANS, host="[::1]", options=options, launch=warm.launch) as swarm,
        join(DEMO_CHECKPOINT, swarm, dtype=torch.bfloat16) as model,
    ):
        assert all(address.startswith("/ip6/") for address in swarm.initial_peers)
        assert generated(model) == generated(machine.world.full)
