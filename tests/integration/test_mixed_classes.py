"""A route of servers in int8, bfloat16 and float32, each a process of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from swarm.demo.local import LocalProcess
from swarm.errors import NoRoute
from swarm.model.eightbits import is_supported
from tests.integration.test_failures import SAME, After
from tests.support.swarms import World, eventually, prompt, world

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not is_supported(), reason="torch has no integer kernels for this processor"),
]


@pytest.fixture(scope="module")
def mixed(checkpoint: Callable[[str], Path], home: Path) -> Iterator[tuple[World, LocalProcess]]:
    """A swarm of three classes, and its server in int8."""
    with world(checkpoint("llama"), home, spans=()) as running:
        start = running.swarm.start_server
        int8 = ("--quantize", "int8", "--quantize-cache", str(home / "rounded"))
        options = {"0:2": ("--dtype", "float32"), "2:4": int8, "4:6": ("--dtype", "bfloat16")}
        servers = {blocks: start(blocks, *more) for blocks, more in options.items()}
        for server in servers.values():
            server.wait_ready()
        yield running, servers["2:4"]


def test_a_mixed_route_says_its_classes_and_promise_refuses_exact_and_tells_a_repair(
    mixed: tuple[World, LocalProcess],
):
    running, rounded = mixed
    model = running.client(dtype="auto")
    got = model.generate(prompt(1, 6), max_new_tokens=12, **SAME)
    assert got.shape == (1, 18)
    assert [hop.numeric_class for hop in model.route] == ["float32", "float32+int8", "bfloat16"]
    assert model.exactness == "tier"
    assert repr(model.route).startswith("3 hops in float32, float32+int8, bfloat16")

    exact = running.client(dtype=torch.float32, exact=True)
    with pytest.raises(NoRoute, match="nobody serves them in float32, but in bfloat16"):
        exact.generate(prompt(1, 6), max_new_tokens=2, **SAME)

    def strike():
        running.swarm.start_server("2:4").wait_ready()
        rounded.kill()

    model.generate(prompt(1, 6), max_new_tokens=24, streamer=After(5, strike), **SAME)
    assert [hop.numeric_class for hop in model.route] == ["float32", "float32", "bfloat16"]
    assert "repaired in another class: blocks 2:4 were in float32+int8 until position" in model.route.explain()
    assert model.exactness == "tier"


def test_a_server_writes_its_rounded_weights_once_it_is_online(mixed: tuple[World, LocalProcess], home: Path):
    eventually(lambda: len(list((home / "rounded").rglob("block-*.safetensors"))) == 2, 30)
