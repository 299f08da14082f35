"""Hops that are killed while guesses are in flight, and one of them is wrong: are the tokens still the right ones?

    python benchmarks/guess_kills.py [--kills 200] [--delay-ms 25] [--check] [--quick] [--json PATH]

Servers of the demo's checkpoint run behind proxies that delay every byte, several for each third of the blocks. A
client generates one text after the other, greedily and seeded in turn, in float32. Its draft is right in `--right` of
its guesses. It sends them in steps of two to four tokens, without a cut-off, so that many steps are in flight.

A hop of the running route gets SIGKILL at the very moment at which at least `--windows` steps are unanswered and one of
them holds a wrong guess. In turns the client has not noticed that yet (`unnoticed`), or the step that takes the wrong
tokens back is under way, too (`taken back`). A killed server starts again, with its identity and address.

Every text, and the state of the random numbers after it, is compared with that of the whole model on this machine.
`--check` exits with 1 if a token is wrong, a generation fails, or not all kills were done.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from common import SEED, Samples, table, write_json
from guess_texts import Text, Texts, differing
from speculation import Oracle, Silent
from torch import Tensor
from transformers import logging as transformers_logging

from swarm.client import AutoDistributedModel
from swarm.client.hf import lead
from swarm.client.hf import model as client
from swarm.client.hf.lead import Drafting, Pending
from swarm.client.hf.model import DistributedModel
from swarm.client.speculation.limits import AheadLimits
from swarm.client.speculation.pipe import Frame
from swarm.demo.cli import CHECKPOINT
from swarm.demo.delay_proxy import delay_proxies
from swarm.demo.distance import free_ports
from swarm.demo.local import LocalProcess, LocalSwarm
from swarm.errors import SwarmError
from tests.support import warm

State = Literal["unnoticed", "taken back"]
STATES: tuple[State, ...] = ("unnoticed", "taken back")
SPANS = ("0:4", "4:8", "8:12")
TURNS = ("greedy", "seeded")
MANY = AheadLimits(cut_off=0.0, frame_tokens=4, frame_tokens_min=2)
PROMPT_TOKENS = (64, 128)
LATER_S = 0.03  # at most, from the step that makes a moment fit to the kill, if it fits still
TICK_S = 0.02
PAUSED_S = 3600.0  # a machine may stop this for a while
END_S = 180.0  # for the last generation


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill. hop: of the route, from 0. windows: steps that were unanswered. tokens: in them."""

    state: State
    way: str
    hop: int
    windows: int
    tokens: int


@dataclass(slots=True)
class Generation:
    """One call of `generate()`. wrong: tokens that are not the whole model's. error: why it failed."""

    way: str
    kills: int = 0
    repairs: int = 0
    wrong: int = 0
    tokens: int = 0
    took_s: float = 0.0
    same_state: bool = True
    error: str | None = None


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--kills", type=int, default=200, help="how many")
    arguments.add_argument("--windows", type=int, default=4, help="steps that are unanswered at a kill, at least")
    arguments.add_argument("--right", type=float, default=0.75, help="share of guesses that are right")
    arguments.add_argument("--holders", type=int, default=3, help="servers of each third of the blocks")
    arguments.add_argument("--delay-ms", type=float, default=25.0, help="one way")
    arguments.add_argument("--tokens", type=int, default=96, help="behind each prompt")
    arguments.add_argument("--minutes", type=float, default=600.0, help="begin no kill after so long")
    arguments.add_argument("--check", action="store_true", help="exit 1 unless the project's promises are kept")
    arguments.add_argument("--quick", action="store_true", help="two kills, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    arguments.add_argument("--add", action="store_true", help="to the kills that are in this file already")
    arguments.add_argument("--seed", type=int, default=SEED)
    options = arguments.parse_args()
    if options.quick:
        options.kills, options.holders = 2, 2
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)  # for the process that servers are forks of
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # which cleans up behind servers that were killed
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with swarm_of(options) as places, joined(places) as model:
        killer = Killer(model, places, options.windows, Random(options.seed))
        generations = rage(killer, model, options)
    kills, before = earlier(options)
    kills += killer.done
    broken = report(kills, before + generations, options)
    if options.check and (broken or len(kills) < options.kills):
        sys.exit(1)


# Servers --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Place:
    """One server through all its lives. addresses: the proxy's, which it announces, and its own."""

    span: str
    addresses: tuple[str, str]
    identity: Path
    process: LocalProcess
    is_killed: bool = False


class Places:
    """The servers. Only the thread that made it starts some: they end with it."""

    def __init__(self, swarm: LocalSwarm, pairs: Sequence[tuple[str, str]], holders: int) -> None:
        """pairs: of each server, the address that it announces and that it listens on. holders: servers of a span."""
        self.swarm = swarm
        spans = [span for span in SPANS for _ in range(holders)]
        files = [swarm.folder / f"place-{n}" for n in range(len(spans))]
        self._all = [
            Place(span, pair, file, self._started(span, pair, file))
            for span, pair, file in zip(spans, pairs, files, strict=True)
        ]
        for place in self._all:
            place.process.wait_ready()

    @property
    def have_spares(self) -> bool:
        """Whether each span would still have a live server without one of those that it has."""
        live = [place.span for place in self._all if place.process.ready and not place.is_killed]
        return all(live.count(span) > 1 for span in SPANS)

    def kill(self, peer_id: str) -> bool:
        """Kill the server of this peer at once. Returns False where it is not live."""
        for place in self._all:
            if place.process.ready.get("peer_id") == peer_id and not place.is_killed:
                os.kill(place.process.process.pid, signal.SIGKILL)
                place.is_killed = True
                return True
        return False

    def tick(self) -> None:
        """Start again what was killed, or has ended."""
        for place in self._all:
            if place.is_killed or not self._is_well(place.process):
                place.process.kill()
                place.process = self._started(place.span, place.addresses, place.identity)
                place.is_killed = False

    @staticmethod
    def _is_well(process: LocalProcess) -> bool:
        """Whether a server runs. One that cannot join a busy machine's swarm in time ends by itself."""
        try:
            process.is_ready()
        except SwarmError:
            return False
        return process.process.poll() is None

    def _started(self, span: str, addresses: tuple[str, str], identity: Path) -> LocalProcess:
        announced, listen = addresses
        reached = ("--listen", listen, "--announce-address", announced)
        return self.swarm.start_server(span, *reached, "--identity", str(identity))


@contextmanager
def swarm_of(options: argparse.Namespace) -> Iterator[Places]:
    """Start all servers, and the proxies in front of them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-kills-")))
        started: dict[str, Any] = {"options": ("--dtype", "float32"), "log_level": "warning", "launch": warm.launch}
        swarm = stack.enter_context(LocalSwarm(CHECKPOINT, **started))
        addresses = [f"127.0.0.1:{port}" for port in free_ports(2 * len(SPANS) * options.holders)]
        half = len(addresses) // 2
        pairs = list(zip(addresses[:half], addresses[half:], strict=True))
        stack.enter_context(delay_proxies(pairs, options.delay_ms, folder / "late.json"))
        yield Places(swarm, pairs, options.holders)


@contextmanager
def joined(places: Places) -> Iterator[DistributedModel]:
    """Join with a client that guesses nothing of its own."""
    swarm = places.swarm
    join = {"initial_peers": swarm.initial_peers, "network": swarm.network, "dtype": torch.float32, "audit": 0.0}
    with AutoDistributedModel.from_pretrained(CHECKPOINT, draft="none", step_timeout_s=PAUSED_S, **join) as model:
        model.generation_config.eos_token_id = None
        yield model


# Kills ----------------------------------------------------------------------------------------------------------------


class Killer:
    """Kills a hop at a moment that fits. `look` is called with each step that leaves."""

    def __init__(self, model: DistributedModel, places: Places, windows: int, rng: Random) -> None:
        """windows: steps that have to be unanswered."""
        self.done: list[Kill] = []
        self.places = places
        self.text: list[int] = []  # that the running generation has to become, prompt included
        self.way = ""
        self.wanted: State | None = None  # the next kill's; None while nothing is to be killed
        self._model = model
        self._windows = windows
        self._rng = rng

    def arm(self) -> None:
        """Let the next moment that fits be a kill; the states take turns."""
        self.wanted = STATES[len(self.done) % len(STATES)]

    def look(self, sent: Sequence[Frame[Pending]]) -> None:
        """Kill, if the moment fits now, and a random while later. Meanwhile the client learns nothing."""
        if self.wanted is None or not self._fits(sent):
            return
        time.sleep(self._rng.uniform(0.0, LATER_S))
        if not (frames := self._fits(sent)):
            return
        session = self._model.backend._latest
        assert session is not None
        hops = session.route
        hop = self._rng.randrange(len(hops))
        if self.places.kill(hops[hop].peer_id):
            tokens = sum(len(frame.tokens) for frame in frames)
            self.done.append(Kill(self.wanted, self.way, hop, len(frames), tokens))
            self.wanted = None

    def _fits(self, sent: Sequence[Frame[Pending]]) -> list[Frame[Pending]]:
        """Return the unanswered steps if there are enough of them, and a wrong guess as it is wanted."""
        frames = unanswered(sent)
        return frames if len(frames) >= self._windows and state_of(frames, self.text) == self.wanted else []


def unanswered(sent: Sequence[Frame[Pending]]) -> list[Frame[Pending]]:
    """Return the steps whose answers have not come, oldest first."""
    return [frame for frame in sent if frame.answer is not None and not frame.answer.is_done]


def state_of(frames: Sequence[Frame[Pending]], text: Sequence[int]) -> State | None:
    """Return what became of a wrong guess in these steps; None if there is none. Pure."""
    found: State | None = None
    for number, frame in enumerate(frames):
        pairs = enumerate(zip(frame.tokens, text[frame.start :], strict=False), frame.start)
        wrong = next((position for position, (token, right) in pairs if token != right), None)
        if wrong is None:
            continue
        if any(later.start <= wrong for later in frames[number + 1 :]):
            return "taken back"
        found = "unnoticed"
    return found


class Watched(lead._Sender):
    """Tells the killer of each step that leaves."""

    def __init__(self, killer: Killer, *arguments: Any) -> None:  # noqa: ANN401 - as the class itself has them
        super().__init__(*arguments)
        self._killer = killer
        self._sent: deque[Frame[Pending]] = deque(maxlen=AheadLimits().frames_max)

    def send(self, frame: Frame[Pending], hidden: Tensor | None) -> None:
        """As ever, and look."""
        super().send(frame, hidden)
        self._sent.append(frame)
        self._killer.look(self._sent)


# Generations ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    """Generations in a thread. crash: what ended it beside errors of the swarm."""

    generations: list[Generation] = field(default_factory=list)
    crash: BaseException | None = None
    stopping: threading.Event = field(default_factory=threading.Event)


def rage(killer: Killer, model: DistributedModel, options: argparse.Namespace) -> list[Generation]:
    """Do all kills while texts come."""
    run, texts = Run(), Texts(CHECKPOINT)
    thread = threading.Thread(target=generate, args=(run, killer, model, texts, options), name="client", daemon=True)
    thread.start()
    began, told = time.monotonic(), 0
    while len(killer.done) < options.kills and time.monotonic() - began < 60 * options.minutes and thread.is_alive():
        time.sleep(TICK_S)
        killer.places.tick()
        if killer.wanted is None and killer.places.have_spares and len(killer.done) < options.kills:
            killer.arm()
        if len(killer.done) >= told + 10:
            told = len(killer.done)
            wrong = sum(made.wrong for made in run.generations)
            print(
                f"{told} kills, {len(run.generations)} generations, {wrong} wrong tokens", file=sys.stderr, flush=True
            )
    killer.wanted = None
    run.stopping.set()
    deadline = time.monotonic() + END_S
    while thread.is_alive() and time.monotonic() < deadline:
        time.sleep(TICK_S)
        killer.places.tick()
    if run.crash is not None:
        raise run.crash
    if thread.is_alive():
        run.generations.append(Generation(killer.way, error="it never ended"))
    return run.generations


def generate(run: Run, killer: Killer, model: DistributedModel, texts: Texts, options: argparse.Namespace) -> None:
    """Generate one text after the other, until told to stop."""
    try:
        while not run.stopping.is_set():
            number = len(run.generations)
            way, seed = TURNS[number % len(TURNS)], options.seed + number
            (prompt,) = texts.prompts(1, PROMPT_TOKENS, 1, seed)
            expected = texts.written(texts.whole, prompt, way, options.tokens, seed)
            killer.text, killer.way = expected.rows[0], way
            run.generations.append(once(killer, model, texts, expected, options, seed))
    except BaseException as crash:  # noqa: BLE001 - the main thread raises it
        run.crash = crash


def once(
    killer: Killer, model: DistributedModel, texts: Texts, expected: Text, options: argparse.Namespace, seed: int
) -> Generation:
    """Generate one text."""
    made, before, began = Generation(killer.way), len(killer.done), time.monotonic()
    right = partial(Oracle, expected.rows[0], options.right, seed)
    model._drafts.drafting = Drafting(Silent, always=True, slow=lambda _: right())
    with patch.object(lead, "_Sender", partial(Watched, killer)), patch.object(client, "AHEAD", MANY):
        try:
            text = texts.written(model, expected.prompt, killer.way, options.tokens, seed)
            made.wrong, made.same_state = differing(text, expected), text.state == expected.state
        except SwarmError as error:
            made.error = f"{type(error).__name__}: {error}"
    session = model.backend._latest
    made.repairs = session.repairs if session is not None else 0
    made.kills, made.tokens = len(killer.done) - before, len(expected.rows[0]) - expected.prompt.shape[1]
    made.took_s = time.monotonic() - began
    return made


def earlier(options: argparse.Namespace) -> tuple[list[Kill], list[Generation]]:
    """Return the kills and generations of runs before, which count as well."""
    if not options.add or options.json is None or not options.json.exists():
        return [], []
    run = json.loads(options.json.read_text())
    return [Kill(**each) for each in run["kills"]], [Generation(**each) for each in run["generations"]]


def report(kills: Sequence[Kill], generations: Sequence[Generation], options: argparse.Namespace) -> list[str]:
    """Print and write everything. Returns the promises that were not kept."""
    rows: list[list[Any]] = []
    for way in TURNS:
        made = [each for each in generations if each.way == way]
        for state in STATES:
            windows = [kill.windows for kill in kills if (kill.way, kill.state) == (way, state)]
            middle = statistics.median(windows) if windows else None
            rows.append([f"{way}, {state}", len(windows), min(windows, default=None), middle, "", "", ""])
        wrong, failed = sum(each.wrong for each in made), sum(each.error is not None for each in made)
        rows.append([f"{way}, all", sum(each.kills for each in made), "", "", len(made), failed, wrong])
    columns = [
        "wrong guess",
        "kills",
        "least steps in flight",
        "median steps in flight",
        "texts",
        "failed",
        "wrong tokens",
    ]
    title = f"{len(kills)} kills, a draft right in {options.right}, {options.delay_ms:g} ms one way"
    table(title, columns, [[str("" if each is None else each) for each in row] for row in rows])
    others = [each for each in generations if each.error is None and not each.same_state]
    broken = [f"{each.way}: {each.error}" for each in generations if each.error is not None]
    broken += [f"{each.way}: {each.wrong} wrong tokens" for each in generations if each.wrong]
    broken += [f"{each.way}: another state of the generator" for each in others]
    for each in broken:
        print(f"not kept: {each}")
    samples = [
        Samples(f"generation, {name}", [1000 * made.took_s for made in generations if bool(made.kills) is disturbed])
        for name, disturbed in (("undisturbed", False), ("disturbed", True))
    ]
    facts = {"kills": [asdict(kill) for kill in kills], "generations": [asdict(made) for made in generations]}
    samples = [each for each in samples if each.ms]
    write_json(options.json, "guess_kills", options.seed, samples, columns=columns, rows=rows, failed=broken, **facts)
    return broken


if __name__ == "__main__":
    main()
