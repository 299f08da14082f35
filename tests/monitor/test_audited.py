"""`swarm-health --audit` as a process over a real swarm, in which one server computes something else."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from swarm.demo.local import LocalProcess, LocalSwarm, Place, launch
from tests.monitor import needs_light
from tests.monitor.test_page import get, page
from tests.support import warm
from tests.support.lying_server import LIE, LIES
from tests.support.swarms import DEMO_CHECKPOINT, environment, eventually

pytestmark = [needs_light, pytest.mark.long]
HONEST = ("0:6", "0:6", "0:6", "6:12", "6:12")
RARE = "1 of 100"  # the lie
AUDITS_MAX = 50  # of one server
SCHEDULE = ("--audit", str(DEMO_CHECKPOINT), "--audit-every", "1", "--audit-share", "1")


def liar_of(swarm: LocalSwarm, lie: str, folder: Path) -> LocalProcess:
    """Start a server that lies."""
    folder.mkdir()
    place = Place(swarm.folder, env={LIE: lie})
    return swarm.start_server("6:12", "--public-name", "liar", place=place).wait_ready()


def started(place: Place, module: str, arguments: Sequence[str], *rest: Any) -> "subprocess.Popen[bytes] | warm.Warm":
    """Start a process; the liar's module is its own."""
    if LIE in place.env:
        return launch(place, "tests.support.lying_server", arguments, *rest)
    return warm.launch(place, module, arguments, *rest)


def servers_of(url: str) -> dict[str, Any]:
    """What the page says of each server's audits, by peer id."""
    (model,) = get(url + "/api/v1/state")["models"] or [None]
    found = [] if model is None else get(f"{url}/api/v1/models/{model['root']}")["servers"]
    return {server["peer_id"]: server["audits"] for server in found if server["audits"]}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lie", LIES)
def test_the_page_finds_a_server_that_lies_and_no_other(lie: str, tmp_path: Path) -> None:
    options = ("--dtype", "float32")
    with LocalSwarm(DEMO_CHECKPOINT, HONEST, env=environment(tmp_path), options=options, launch=started) as swarm:
        liar = liar_of(swarm, lie, tmp_path / "liar").ready["peer_id"]
        folder = tmp_path / "evidence"
        with page(tmp_path, swarm, *SCHEDULE, "--audit-evidence", str(folder)) as running:
            url = running.ready["url"]
            seen: dict[str, Any] = {}

            def found() -> bool:
                seen.update(servers_of(url))
                wrong = {peer for peer, audits in seen.items() if audits["finding"] == "wrong"}
                assert wrong <= {liar}, "an honest server was taken for wrong"
                return liar in wrong

            eventually(found, 600, 0.5)
            assert seen[liar]["audited"] <= AUDITS_MAX
            assert get(url + "/api/v1/state")["models"][0]["servers_wrong"] == 1
            if lie != RARE:  # it may be right each time that it is asked to sign
                eventually(lambda: list(folder.glob("*.evidence")), 120, 0.5)
    for file in folder.glob("*.evidence"):
        check(file, liar)


def check(file: Path, liar: str) -> None:
    """The file shows the liar as wrong, and nothing once a byte has changed."""
    assert shown(file, 0).splitlines()[0] == f"server   {liar}"
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    file.write_bytes(changed)
    assert "not those that the server signed" in shown(file, 1)


def shown(file: Path, code: int) -> str:
    """What the command says of a file, as somebody who was not there."""
    verify = (sys.executable, "-m", "swarm.client.auditing.cli", str(file), str(DEMO_CHECKPOINT))
    ended = subprocess.run(verify, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr
