"""A swarm of real processes in the lab: every machine has a network of its own."""

from pathlib import Path

import pytest

from tests.support.lab import Lab
from tests.support.lab.swarm import LabSwarm, local_tokens
from tests.support.swarms import DEMO_SPANS

TOKENS = 24


@pytest.mark.long
def test_client_behind_a_router_generates_as_the_local_model(lab: Lab, tmp_path: Path):
    home = lab.site("port_restricted", delay_ms=10)
    with LabSwarm(tmp_path) as swarm:
        swarm.bootstrap(lab.public_host(delay_ms=5))
        servers = swarm.servers({blocks: lab.public_host(delay_ms=10) for blocks in DEMO_SPANS})
        (generated,) = swarm.generate(home.host(), TOKENS, draft="none").result()
        assert generated.tokens == local_tokens(TOKENS)
        assert len(generated.route) == len(servers)
        assert min(generated.gaps_s) > 0.08  # four ways, each with the delays of two sites
