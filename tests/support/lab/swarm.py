"""The swarm's commands on hosts of the lab, over the demo's checkpoint."""

import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm.demo.local import LocalProcess
from tests.support import warm
from tests.support.lab.generation import GenerationRequest, go_file
from tests.support.lab.lab import Host
from tests.support.swarms import DEMO_CHECKPOINT, environment, eventually

NETWORK = "lab"
PROMPT = "def quicksort(items):"
BOOTSTRAP_PORT = 31337
GENERATION_S = 120.0  # for a whole generation, with the client's start
LOG_LINES = 60  # of each process, when a test has failed


@dataclass(frozen=True, slots=True)
class Round:
    """One generation. at_s: of each token, since the generation began. route: (peer id, blocks) of each hop."""

    tokens: tuple[int, ...]
    at_s: tuple[float, ...]
    route: tuple[tuple[str, str], ...]

    @property
    def ttft_s(self) -> float:
        """The time until the first token."""
        return self.at_s[0]

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """The times between tokens."""
        return tuple(later - earlier for earlier, later in zip(self.at_s, self.at_s[1:], strict=False))


class Generation:
    """A client that generates, in a process on a host of the lab."""

    def __init__(self, process: LocalProcess, results: Path, rounds: int) -> None:
        self.process = process
        self._results, self._rounds = results, rounds
        self._known: list[dict[str, Any]] = []  # lines
        self._known_bytes = 0

    def tokens(self) -> int:
        """How many tokens it has so far, of all rounds."""
        return sum("token" in line for line in self._lines())

    def wait_tokens(self, count: int, within_s: float = GENERATION_S) -> None:
        """Wait until it has so many. Fails if its process ends before."""

        def reached() -> bool:
            if self.tokens() >= count:
                return True
            assert self.process.process.poll() is None, self.process.last_lines()
            return False

        eventually(reached, within_s)

    def result(self, within_s: float = GENERATION_S) -> list[Round]:
        """Wait for its end. Fails if it has failed."""
        code = self.process.process.wait(within_s)
        assert code == 0, self.process.last_lines()
        rounds = list(self.finished())
        assert len(rounds) == self._rounds
        return rounds

    @property
    def joined_s(self) -> float:
        """How long the client took to join, once it has."""
        return float(self._lines()[0]["joined_s"])

    def go(self, number: int) -> None:
        """Let a paced client begin a round."""
        go_file(self._results, number).touch()

    def finished(self) -> Iterator[Round]:
        """Yield the rounds that are over."""
        at_s: list[float] = []
        for line in self._lines():
            if "token" in line:
                at_s.append(line["at_s"])
            elif "tokens" in line:
                route = tuple((hop["peer"], hop["blocks"]) for hop in line["route"])
                yield Round(tuple(line["tokens"]), tuple(at_s), route)
                at_s = []

    def _lines(self) -> list[dict[str, Any]]:
        """Return all whole lines; each is read once, since a long run is looked at very often."""
        if self._results.exists():
            with self._results.open("rb") as file:
                file.seek(self._known_bytes)
                whole = file.read().rpartition(b"\n")
            self._known += [json.loads(line) for line in whole[0].splitlines()]
            self._known_bytes += len(whole[0]) + len(whole[1])
        return self._known


class LabSwarm:
    """Starts processes of one swarm on hosts. A context manager: they have ended when the block has.

    folder: of logs, identities and caches. An error that leaves the block gets all logs' last lines as notes.
    """

    def __init__(self, folder: Path, checkpoint: Path = DEMO_CHECKPOINT, env: Mapping[str, str] | None = None) -> None:
        self.folder, self.checkpoint = folder, checkpoint
        self.initial_peers: list[str] = []
        self.processes: list[LocalProcess] = []
        offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self._env = {**os.environ, **environment(folder), **offline, **(env or {})}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            for process in self.processes:
                lines = process.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                error.add_note("\n".join((f"--- {process.name}", *lines)))
        with ExitStack() as stopping:
            for process in self.processes:
                stopping.callback(process.stop)
            for process in self.processes[1:]:  # the first lives while the others withdraw what they announced
                process.ask_to_stop()

    def bootstrap(self, host: Host, *options: str) -> LocalProcess:
        """Start a bootstrap node on a public host and wait until it is ready; later processes join through it.

        It takes the place of one that ran there before, which has another identity.
        """
        address = f"{host.address}:{BOOTSTRAP_PORT}"
        self.initial_peers = [peer for peer in self.initial_peers if f"/{host.address}/" not in peer]
        arguments = ("--listen", f"0.0.0.0:{BOOTSTRAP_PORT}", "--announce-address", address, *self._joining(), *options)
        process = self.start(host, "bootstrap", "swarm.dht.cli", arguments).wait_ready()
        self.initial_peers += [peer for peer in process.ready["addresses"] if f"/{host.address}/" in peer]
        return process

    def server(self, host: Host, blocks: str, *options: str) -> LocalProcess:
        """Start a server with its default ports; `wait_ready` waits for it."""
        arguments = (str(self.checkpoint), "--blocks", blocks, "--dtype", "float32", "--threads", "1")
        return self.start(host, "server", "swarm.server.cli", (*arguments, *self._joining(), *options))

    def servers(self, spans: Mapping[str, Host], *options: str) -> list[LocalProcess]:
        """Start a server for each span, side by side, and wait until all are ready."""
        started = [self.server(host, blocks, *options) for blocks, host in spans.items()]
        return [server.wait_ready() for server in started]

    def generate(
        self, host: Host, tokens: int = 32, rounds: int = 1, *, paced: bool = False, **options: str | int | float
    ) -> Generation:
        """Start a client that generates greedily. options: of `AutoDistributedModel.from_pretrained`.

        paced: each round waits until `Generation.go` lets it begin.
        """
        request = GenerationRequest(
            checkpoint=str(self.checkpoint),
            initial_peers=tuple(self.initial_peers),
            network=NETWORK,
            prompt=PROMPT,
            tokens=tokens,
            rounds=rounds,
            paced=paced,
            options=options,
        )
        name = self._name("client")
        asked, results = self.folder / f"{name}.request", self.folder / f"{name}.results"
        asked.write_text(request.model_dump_json())
        process = self._launch(host, name, "tests.support.lab.generation", (str(asked), str(results)))
        return Generation(process, results, rounds)

    def start(self, host: Host, name: str, module: str, arguments: Sequence[str]) -> LocalProcess:
        """Start any of the swarm's commands; it gets an identity, and a name with a number."""
        name = self._name(name)
        common = ("--identity", str(self.folder / f"{name}.identity"), "--network", NETWORK, "--log-level", "info")
        return self._launch(host, name, module, (*arguments, *common))

    def _launch(self, host: Host, name: str, module: str, arguments: Sequence[str]) -> LocalProcess:
        process = LocalProcess(name, module, arguments, host.place(self.folder), self._env, warm.launch)
        self.processes.append(process)
        return process

    def _joining(self) -> tuple[str, ...]:
        return ("--initial-peers", ",".join(self.initial_peers)) if self.initial_peers else ()

    def _name(self, kind: str) -> str:
        return f"{kind}-{sum(process.name.startswith(kind) for process in self.processes)}"


@functools.cache
def local_tokens(count: int, checkpoint: Path = DEMO_CHECKPOINT) -> tuple[int, ...]:
    """What the whole local model says, greedily."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(checkpoint)(PROMPT, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=count, do_sample=False)
    return tuple(out[0, ids.shape[1] :].tolist())
