"""Servers behind routers, found and used without any option: each generation is the local model's."""

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.lab import Lab
from tests.support.lab.lab import Site
from tests.support.lab.swarm import LabSwarm, local_tokens
from tests.support.swarms import DEMO_SPANS

TOKENS = 24
STARTS_S = 15  # a client imports and joins, on a machine that may be busy


def spread(lab: Lab, kinds: tuple[str, ...]) -> list[Site]:
    return [lab.site(kind, delay_ms=10) for kind in kinds]


def ways(swarm: LabSwarm) -> Counter[str]:
    """How the channels to hidden peers came about, as all processes tell."""
    found: Counter[str] = Counter()
    for process in swarm.processes:
        for line in process.log.read_text().splitlines():
            if '"met a hidden peer"' in line:
                found[json.loads(line)["way"]] += 1
    return found


def generation(lab: Lab, folder: Path, client: str, kinds: tuple[str, ...]) -> Counter[str]:
    """Generate through servers behind such routers. Returns the ways; fails unless the tokens are the local model's."""
    homes, home = spread(lab, kinds), lab.site(client, delay_ms=10)
    with LabSwarm(folder, env={"SWARM_LOG_LEVEL": "info"}) as swarm:
        swarm.bootstrap(lab.public_host(delay_ms=5))
        swarm.servers(dict(zip(DEMO_SPANS, (each.host() for each in homes), strict=True)))
        (generated,) = swarm.generate(home.host(), TOKENS).result()
        assert generated.tokens == local_tokens(TOKENS)
        assert len(generated.route) == len(homes)
        return ways(swarm)


@pytest.mark.slow("five processes of the swarm")
def test_one_direct_one_punched_and_one_relayed_server_generate(lab: Lab, tmp_path: Path):
    found = generation(lab, tmp_path, "port_restricted", ("public", "port_restricted", "symmetric"))
    assert {"reverse", "punched", "relayed"} >= set(found) >= {"relayed"}
    assert "no other node reaches" not in "".join(log.read_text() for log in tmp_path.rglob("*.log"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("client", "kinds"),
    [
        ("public", ("port_restricted", "full_cone", "address_restricted")),
        ("port_restricted", ("port_restricted",) * 3),
        ("full_cone", ("address_restricted", "reject", "port_restricted")),
        ("double", ("double",) * 3),
    ],
)
def test_routes_behind_cone_routers_are_punched(lab: Lab, tmp_path: Path, client: str, kinds: tuple[str, ...]):
    assert "punched" in generation(lab, tmp_path, client, kinds)


@pytest.mark.long
@pytest.mark.parametrize(
    ("client", "kinds"),
    [
        ("port_restricted", ("symmetric", "port_restricted", "port_restricted")),
        ("symmetric", ("port_restricted",) * 3),
        ("symmetric", ("symmetric",) * 3),
        ("double_symmetric", ("symmetric", "double", "public")),
    ],
)
def test_routes_with_symmetric_routers_generate(lab: Lab, tmp_path: Path, client: str, kinds: tuple[str, ...]):
    assert "relayed" in generation(lab, tmp_path, client, kinds)


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_anchors_death_in_the_middle_changes_no_token(lab: Lab, tmp_path: Path, how: signal.Signals):
    homes = spread(lab, ("symmetric",) * 3)
    client = lab.site("symmetric", delay_ms=10)
    with LabSwarm(tmp_path) as swarm:
        anchors = [swarm.bootstrap(lab.public_host(delay_ms=5)) for _ in range(2)]
        swarm.servers(dict(zip(DEMO_SPANS, (each.host() for each in homes), strict=True)))
        generated = swarm.generate(client.host(), 96)
        generated.wait_tokens(20)
        os.kill(anchors[0].ready["pid"], how)
        (result,) = generated.result()
        if how is signal.SIGSTOP:
            os.kill(anchors[0].ready["pid"], signal.SIGCONT)
        assert result.tokens == local_tokens(96)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "moved"), [("port_restricted", "its router"), ("port_restricted", "itself"), ("public", "its router")]
)
def test_a_new_address_in_the_middle_changes_no_token(lab: Lab, tmp_path: Path, kind: str, moved: str):
    """Nothing else has these blocks: a fresh client finds them as soon as the server's record is right again."""
    homes, client = spread(lab, ("port_restricted", kind, "port_restricted")), lab.site("port_restricted", delay_ms=10)
    hosts = [each.host() for each in homes]
    with LabSwarm(tmp_path) as swarm:
        for _ in range(2):
            swarm.bootstrap(lab.public_host(delay_ms=5))
        swarm.servers(dict(zip(DEMO_SPANS, hosts, strict=True)))
        generated = swarm.generate(client.host(), 96)
        generated.wait_tokens(20)
        began = time.monotonic()
        (homes if moved == "its router" else hosts)[1].renumber()
        (fresh,) = swarm.generate(lab.site("public", delay_ms=10).host(), TOKENS).result()
        took_s = time.monotonic() - began
        (result,) = generated.result()
        assert (result.tokens, fresh.tokens) == (local_tokens(96), local_tokens(TOKENS))
        assert took_s < 15 + STARTS_S
