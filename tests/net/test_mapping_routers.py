"""Ports mapped at miniupnpd, in network namespaces, and answered from outside."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.support.often import rest_is_long
from tests.support.router import CARRIERS, GLOBAL, Router, home_router, missing

WHY = missing()
PORTS = (31330, 31331)

pytestmark = [
    pytest.mark.skipif(bool(WHY), reason=WHY),
    pytest.mark.slow("a router, and programs behind it that import on their own"),
]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    with home_router(tmp_path_factory.mktemp("router")) as lab:
        yield lab


@contextmanager
def mapped(lab: Router, by: str) -> Iterator[tuple[dict, Callable[[], dict]]]:
    """A program in the home asks for the ports. Yields what it found, and what has it renew them and find again."""
    line = (sys.executable, "-m", "tests.net.mapping_home", by, *map(str, PORTS))
    with lab.popen(lab.home, *line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:

        def renewed() -> dict:
            child.stdin.write("renew\n")
            child.stdin.flush()
            return json.loads(child.stdout.readline())

        yield json.loads(child.stdout.readline()), renewed
        assert child.communicate()[0] == "gone\n"
    assert child.returncode == 0


@pytest.mark.parametrize("by", rest_is_long(["PCP", "NAT-PMP", "UPnP", "any"], ["UPnP", "any"]))
def test_mapped_ports_are_answered_from_outside(router: Router, by: str) -> None:
    assert not router.reached(PORTS[0])
    with mapped(router, by) as (found, renewed):
        assert [mapping[:3] for mapping in found["mappings"]] == [[port, GLOBAL, port] for port in PORTS]
        assert by in {"any", found["mappings"][0][3]}
        assert all(router.reached(port) for port in PORTS)
        assert not router.reached(40000)
        again = renewed()
        assert (again["mappings"], again["refusals"]) == (found["mappings"], [])
        assert all(router.reached(port) for port in PORTS)
    assert not router.reached(PORTS[0])
    assert "dnat" not in router.rules()


def test_a_router_behind_a_carriers_nat_gives_no_port(tmp_path) -> None:
    with home_router(tmp_path, outer=CARRIERS) as lab, mapped(lab, "any") as (found, _):
        assert found["mappings"] == []
        assert len(found["refusals"]) == 3
        assert "dnat" not in lab.rules()


def test_a_router_that_maps_nothing_is_known_soon(tmp_path) -> None:
    with home_router(tmp_path, daemon=False) as lab, mapped(lab, "any") as (found, _):
        assert found["mappings"] == []
        assert 1.5 <= found["took_s"] < 5.0
