"""What crosses the network: how much, between whom, and what a listener or a forger gets out of it."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarm.activations import Activations
from swarm.client.hf.swarm import WaitingSession
from swarm.errors import StepTimeout
from swarm.protocol.codec import encode
from swarm.protocol.messages import Step
from swarm.protocol.tensors import meta_of
from tests.support.logits import same_logits
from tests.support.often import rest_is_long
from tests.support.proxy import ByteProxy, Link, holds_port, listening_address_of
from tests.support.swarms import SPANS, World, eventually, prompt, world

HIDDEN = 64
FLOAT_BYTES = 4
FRAME_EXTRA_BYTES = 600  # header, length and tag of one message
WINDOW_BYTES = 16

Edge = tuple[str, int, str]  # who dialled, the number of the dialled server, direction


@dataclass(slots=True)
class Watched:
    """A swarm whose every connection for activations passes through a proxy."""

    world: World
    proxies: list[ByteProxy]

    def who(self, link: Link) -> str:
        """Name the process that dialled: "client" or a server's name."""
        pids = {"client": os.getpid()} | {s.name: s.ready["pid"] for s in self.world.swarm.servers}
        return next((name for name, pid in pids.items() if holds_port(pid, link.dialler_port)), "")

    def link(self, dialler: str, server: int) -> Link:
        """The open connection between these two, the latest if there are several."""
        links = [link for link in self.proxies[server].links if link.open]
        return [link for link in links if self.who(link) == dialler][-1]

    def bytes_by_edge(self) -> Counter[Edge]:
        """Bytes so far on every open connection."""
        counts: Counter[Edge] = Counter()
        for number, proxy in enumerate(self.proxies):
            for link in proxy.links:
                if link.open:
                    counts[self.who(link), number, "sent"] += len(link.sent)
                    counts[self.who(link), number, "received"] += len(link.received)
        return counts

    def recording(self) -> bytes:
        """Everything that was on the wire."""
        streams = (bytes(link.sent) + bytes(link.received) for proxy in self.proxies for link in proxy.links)
        return b"\0".join(streams)


@pytest.fixture(scope="module")
def watched(checkpoint: Callable[[str], Path], home: Path) -> Iterator[Watched]:
    with watch(checkpoint("llama"), home, SPANS) as watched:
        yield watched


@contextmanager
def watch(checkpoint: Path, home: Path, spans: Sequence[str]) -> Iterator[Watched]:
    with ExitStack() as stack:
        started = stack.enter_context(world(checkpoint, home, spans=()))
        proxies = []
        for blocks in spans:
            targets: list[int] = []
            proxy = stack.enter_context(ByteProxy(partial(_target, targets)))
            server = started.swarm.start_server(blocks, "--announce-address", proxy.address)
            targets.append(server.process.pid)
            proxies.append(proxy)
        for server, proxy in zip(started.swarm.servers, proxies, strict=True):
            server.wait_ready()
            online = eventually(lambda log=server.log: _online(log), within_s=60)
            assert proxy.address in online, server.log.read_text()  # or it is reached beside the proxy
        yield Watched(started, proxies)


def _online(log: Path) -> str:
    """Return the line that says how a server is reached; "" until there is one."""
    return next((line for line in log.read_text().splitlines() if '"online"' in line), "")


def _target(pids: list[int]) -> tuple[str, int] | None:
    return listening_address_of(pids[0]) if pids else None


@pytest.fixture(scope="module")
def client(watched: Watched) -> PreTrainedModel:
    return watched.world.client(step_timeout_s=5.0)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_a_step_is_one_activation_on_each_of_four_edges_and_none_elsewhere(watched: Watched, client: PreTrainedModel):
    rows, steps = 16, 8
    activation = rows * HIDDEN * FLOAT_BYTES
    out = client(prompt(rows, 5))
    before = watched.bytes_by_edge()
    for _ in range(steps):
        out = client(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values)
    grown = watched.bytes_by_edge()
    grown.subtract(before)
    ring: list[Edge] = [
        ("client", 0, "sent"),
        ("server-0", 1, "sent"),
        ("server-1", 2, "sent"),
        ("client", 2, "received"),
    ]
    for edge in ring:
        count = grown.pop(edge)
        assert steps * activation < count < steps * (activation + FRAME_EXTRA_BYTES), edge
    assert sum(grown.values()) < activation, grown


def test_only_the_last_position_of_a_prefill_comes_back(watched: Watched, client: PreTrainedModel):
    tokens = 128
    client.generate(prompt(1, 5), max_new_tokens=1, pad_token_id=0)  # so that connections are there already
    before = watched.bytes_by_edge()
    client.generate(prompt(1, tokens), max_new_tokens=1, pad_token_id=0)
    grown = watched.bytes_by_edge()
    grown.subtract(before)
    prefill = tokens * HIDDEN * FLOAT_BYTES
    for edge in (("client", 0, "sent"), ("server-0", 1, "sent"), ("server-1", 2, "sent")):
        assert prefill < grown[edge] < prefill + 8 * FRAME_EXTRA_BYTES
    back = sum(count for (who, _, direction), count in grown.items() if who == "client" and direction == "received")
    assert HIDDEN * FLOAT_BYTES < back < HIDDEN * FLOAT_BYTES + 8 * FRAME_EXTRA_BYTES


def test_a_recording_holds_no_activations_and_no_text(
    watched: Watched, client: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
):
    text = "the quick brown fox jumps over the lazy dog"
    ids = torch.tensor([list(text.encode())])  # the vocabulary is as large as ASCII
    seen: list[Tensor] = []
    step = WaitingSession.step

    def observed(self: WaitingSession, sent: Activations, **arguments: object) -> Tensor:
        output = step(self, sent, **arguments)
        seen.extend((sent.hidden, output))
        return output

    monkeypatch.setattr(WaitingSession, "step", observed)
    got = client.generate(ids, max_new_tokens=12, pad_token_id=0, eos_token_id=None, logits_to_keep=0)
    between = watched.world.full(got[:, :-1], output_hidden_states=True).hidden_states
    known = [*seen, between[1], between[4]]  # what the client handles, and what the servers hand to each other

    recorded = watched.recording()
    assert len(recorded) > 4 * between[0].numel() * FLOAT_BYTES  # everything that follows was on the wire
    windows = set().union(*map(activation_windows, known))
    assert len(windows) > 1000
    assert not found(windows, recorded)
    generated = bytes(got[0].tolist())
    for secret in (generated, got[0].numpy().tobytes(), got[0].int().numpy().tobytes(), str(got[0].tolist()).encode()):
        for start in range(0, len(secret) - WINDOW_BYTES, 8):
            assert secret[start : start + WINDOW_BYTES] not in recorded

    # The search is able to find them: this is what the same frames look like before they are sealed.
    message = Step(session="0" * 32, epoch=0, step=1, keep=0, budget_ms=1, want=1, hidden=meta_of(seen[0]))
    assert found(windows, b"?" + b"".join(encode(message, Activations(seen[0]))))


EDGES = {
    "from the client to hop 1": ("client", 0, "sent"),
    "from hop 1 to hop 2": ("server-0", 1, "sent"),
    "from hop 3 to the client": ("client", 2, "received"),
}
PLACES = (4, 5, 20, 60, 150, 200, 300, 400, 500, -17, -16, -1)  # header, padding, activations, tag; not the length


@pytest.mark.parametrize("edge", rest_is_long(EDGES, []))
def test_a_flipped_bit_ends_the_channel_and_costs_a_repair_but_no_token(
    watched: Watched, client: PreTrainedModel, edge: str
):
    dialler, server, direction = EDGES[edge]
    for number, place in enumerate(PLACES):
        out = client(prompt(1, 6))
        local = watched.world.full(prompt(1, 6), use_cache=True)
        link = watched.link(dialler, server)
        link.flip_bit(direction, place, number % 8)
        got = client(prompt(1, 1), past_key_values=out.past_key_values).logits
        assert same_logits(got, watched.world.full(prompt(1, 1), past_key_values=local.past_key_values).logits)
        assert not link.flips
        eventually(lambda link=link: not link.open, within_s=5)
    assert torch.equal(greedy(client), greedy(watched.world.full))


@pytest.mark.long
def test_a_flipped_bit_in_a_frames_length_never_gives_a_wrong_token(watched: Watched):
    for place in (0, 3):
        for dialler, server, direction in (EDGES["from the client to hop 1"], EDGES["from hop 3 to the client"]):
            client = watched.world.client(step_timeout_s=1.0)
            out = client(prompt(1, 6))
            link = watched.link(dialler, server)
            link.flip_bit(direction, place, 7)
            # either the claimed length is refused at once, and repaired; or the rest of the frame never comes
            with suppress(StepTimeout):
                got = client(prompt(1, 1), past_key_values=out.past_key_values).logits
                local = watched.world.full(prompt(1, 6), use_cache=True).past_key_values
                assert same_logits(got, watched.world.full(prompt(1, 1), past_key_values=local).logits)
            assert not link.flips
            client.close()
    with watched.world.client() as fresh:
        assert torch.equal(greedy(fresh), greedy(watched.world.full))


@pytest.mark.long
def test_a_failover_sends_again_what_the_dead_hop_had_received_and_nothing_else(
    checkpoint: Callable[[str], Path], home: Path
):
    tokens = 120
    past, control = tokens * HIDDEN * FLOAT_BYTES, 8 * 1024  # a record, some 1.5 kB, comes with Open and with Reroute
    with watch(checkpoint("llama"), home, (*SPANS, SPANS[1])) as watched, watched.world.client() as client:
        out = client(prompt(1, tokens))
        dead, twin = sorted((1, 3), key=lambda n: watched.world.swarm.servers[n].ready["peer_id"] not in route(client))
        before = watched.bytes_by_edge()
        watched.world.swarm.servers[dead].kill()
        got = client(prompt(1, 1), past_key_values=out.past_key_values).logits
        local = watched.world.full(prompt(1, tokens), use_cache=True).past_key_values
        assert same_logits(got, watched.world.full(prompt(1, 1), past_key_values=local).logits)
        grown = watched.bytes_by_edge()
        grown.subtract(before)
        replayed = grown.pop(("server-0", twin, "sent"))
        assert past < replayed < past + 3 * HIDDEN * FLOAT_BYTES + control
        others = {edge: count for edge, count in grown.items() if edge[1] != dead}
        assert {("client", 0, "sent"), ("client", twin, "sent"), (f"server-{twin}", 2, "sent")} <= others.keys()
        assert max(others.values()) < control < past / 3


def route(client: PreTrainedModel) -> list[str]:
    return [hop.peer_id for hop in client.route]


def greedy(model: PreTrainedModel) -> Tensor:
    return model.generate(prompt(1, 6), max_new_tokens=4, pad_token_id=0, eos_token_id=None)


def activation_windows(activation: Tensor) -> set[bytes]:
    """Every 16 bytes of an activation that begin with one of its numbers."""
    data = activation.contiguous().numpy().tobytes()
    return {data[i : i + WINDOW_BYTES] for i in range(0, len(data) - WINDOW_BYTES + 1, FLOAT_BYTES)}


def found(windows: set[bytes], recorded: bytes) -> bool:
    """Whether any window is anywhere in the recording."""
    return any(recorded[i : i + WINDOW_BYTES] in windows for i in range(len(recorded) - WINDOW_BYTES + 1))
