"""Relayed channels of a running generation become direct, once a router lets them."""

import json
from pathlib import Path

import pytest

from tests.support.lab import Lab
from tests.support.lab.swarm import LabSwarm, local_tokens
from tests.support.swarms import eventually

TOKENS = 900  # one of three channels may need a second try, ten seconds later
SPANS = ("0:6", "6:12")


def moves(swarm: LabSwarm) -> set[tuple[str, str, str]]:
    """Who has moved a channel, with which peer, and to which way. Two servers that meet at once keep two channels."""
    return {
        (str(process.log), told["peer"], told["way"])
        for process in swarm.processes
        for line in process.log.read_text().splitlines()
        if '"a channel has moved"' in line and (told := json.loads(line))
    }


@pytest.mark.long
def test_a_relayed_route_becomes_direct_in_the_middle(lab: Lab, tmp_path: Path):
    homes, home = [lab.site("symmetric", delay_ms=10) for _ in SPANS], lab.site("port_restricted", delay_ms=10)
    with LabSwarm(tmp_path, env={"SWARM_LOG_LEVEL": "info"}) as swarm:
        anchor = lab.site("public", delay_ms=10)
        swarm.bootstrap(anchor.host())
        swarm.servers(dict(zip(SPANS, (each.host() for each in homes), strict=True)))

        def relayed_bytes() -> int:
            return sum(lab.traffic(anchor, each) for each in (*homes, home))

        generated = swarm.generate(home.host(), TOKENS)
        generated.wait_tokens(4)
        before = relayed_bytes(), generated.tokens()
        generated.wait_tokens(20)
        a_token = (relayed_bytes() - before[0]) / (generated.tokens() - before[1])
        for each in homes:
            each.become("port_restricted")
        eventually(lambda: len(moves(swarm)) == 6, 60)  # three pairs: each server and the client, and the servers
        before = relayed_bytes(), generated.tokens()
        (result,) = generated.result()
        assert {way for _, _, way in moves(swarm)} == {"punched"}
        assert result.tokens == local_tokens(TOKENS)
        left = len(result.tokens) - before[1]
        assert left > 20
        assert (relayed_bytes() - before[0]) / left < a_token / 3  # the anchor answers look-ups, too
        logs = "".join(process.log.read_text() for process in swarm.processes)
        assert "route broken" not in logs
