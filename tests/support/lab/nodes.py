"""A DHT on hosts of the lab: public nodes, and nodes behind routers that nobody can call."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from swarm.demo.local import LocalProcess
from tests.support import warm
from tests.support.lab.lab import Host
from tests.support.lab.node import Lookups, NodeRequest, NodeState
from tests.support.swarms import environment, eventually

PORT = 31337
WITHIN_S = 60.0  # for a node to find out what it is
MODULE = "tests.support.lab.node"


@dataclass(frozen=True, slots=True)
class LabNode:
    """A node's process on a host."""

    host: Host
    process: LocalProcess
    state_path: Path

    @property
    def state(self) -> NodeState:
        """What it is now."""
        return NodeState.model_validate_json(self.state_path.read_text())


@dataclass(slots=True)
class LabDht:
    """Starts nodes. A context manager: they have ended when the block has. proven: as NodeRequest's, of all nodes."""

    folder: Path
    proven: bool = False
    nodes: list[LabNode] = field(default_factory=list)
    initial_peers: tuple[str, ...] = ()
    _count: int = 0

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            for node in self.nodes:
                error.add_note(f"--- {node.process.name}\n{node.process.last_lines()}")
        with ExitStack() as stopping:
            for node in self.nodes:
                stopping.callback(node.process.stop)
            for node in self.nodes:
                node.process.ask_to_stop()

    def public(self, hosts: Sequence[Host]) -> list[LabNode]:
        """Start nodes that others can call, and wait until they serve. The first two are the swarm's initial peers."""
        started: list[LabNode] = []
        for host in hosts:
            node = self._start(host, announce=host.address)
            started.append(node)
            if len(self.initial_peers) < 2:
                node.process.wait_ready()
                self.initial_peers += node.state.addresses[:1]
        for node in started:
            node.process.wait_ready()
            eventually(lambda node=node: node.state.serves and node.state.announced > 0, within_s=WITHIN_S)
        return started

    def hidden(self, hosts: Sequence[Host], records: int = 1) -> list[LabNode]:
        """Start nodes behind routers, which listen as all do, and wait until they have announced their records."""
        started = [self._start(host, records=records) for host in hosts]
        for node in started:
            node.process.wait_ready()
            eventually(lambda node=node: node.state.announced > 0, within_s=WITHIN_S)
        return started

    def look_up(self, host: Host, times: int) -> Lookups:
        """Join as a client, in a process of its own, and look all servers up so many times."""
        asked, result = self._paths("client")
        request = NodeRequest(initial_peers=self.initial_peers, lookups=times)
        asked.write_text(request.model_dump_json())
        process = self._launch(host, asked, ("--lookups", str(result)))
        code = process.process.wait(WITHIN_S)
        assert code == 0, process.last_lines()
        return Lookups.model_validate_json(result.read_text())

    def _start(self, host: Host, **fields: object) -> LabNode:
        asked, _ = self._paths("node")
        request = NodeRequest(
            identity=str(asked.with_suffix(".identity")),
            port=PORT,
            initial_peers=self.initial_peers,
            proven=self.proven,
            **fields,  # type: ignore[arg-type]
        )
        asked.write_text(request.model_dump_json())
        process = self._launch(host, asked, ())
        node = LabNode(host, process, self.folder / f"{process.name}.json")
        self.nodes.append(node)
        return node

    def _launch(self, host: Host, asked: Path, arguments: Sequence[str]) -> LocalProcess:
        env = {**os.environ, **environment(self.folder), "OMP_NUM_THREADS": "1"}
        return LocalProcess(asked.stem, MODULE, (str(asked), *arguments), host.place(self.folder), env, warm.launch)

    def _paths(self, kind: str) -> tuple[Path, Path]:
        self._count += 1
        name = f"{kind}-{self._count}"
        return self.folder / f"{name}.request", self.folder / f"{name}.result"
