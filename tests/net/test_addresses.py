"""The machine's own addresses, in a network of their own, and the notice of their changes, on clocks of the test's."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.net import addresses
from swarm.net.address import Tcp
from swarm.net.addresses import AddressLimits, Change, Watch, changes, dialled_at

REPOSITORY = Path(__file__).parents[2]
OWN_NETWORK = ("unshare", "--net") if os.geteuid() == 0 else ("unshare", "--map-root-user", "--net")
HERE, THERE = ("192.168.1.5",), ("10.0.0.7", "2003:1::7")
INSIDE = """
import asyncio, json, subprocess, sys
from swarm.net.addresses import AddressLimits, changes, own_addresses

def ip(arguments):
    subprocess.run(["ip", *arguments.split()], check=True)

def told(change):
    return [*change.addresses, *(["gone", *change.gone] if change.gone else ())]

async def main(rounds):
    watch = changes(limits=AddressLimits(every_s=0.02))
    ip("link add net0 type veth peer name net1")
    for name in ("lo", "net0", "net1"):
        ip(f"link set {name} up")
    seen = []
    for commands, waits in rounds:
        change = asyncio.ensure_future(anext(watch)) if waits else None
        await asyncio.sleep(0)
        for command in commands:
            ip(command)
        seen.append(told(await change) if change else list(own_addresses()))
    print(json.dumps(seen))

asyncio.run(main(json.loads(sys.argv[1])))
"""


def own_network():
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*OWN_NETWORK, "true"], capture_output=True, check=False).returncode == 0


in_own_network = pytest.mark.skipif(not own_network(), reason="no network namespace can be made here")


def inside(*rounds, settings=()):
    """Return the addresses after each round. rounds: commands of `ip`, and whether to wait for the notice of them."""
    prepared = " && ".join([*(f"sysctl -qw net.ipv6.conf.default.{each}" for each in settings), 'exec "$0" "$@"'])
    line = [*OWN_NETWORK, "sh", "-c", prepared, sys.executable, "-c", INSIDE, json.dumps(rounds)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=20, check=True, cwd=REPOSITORY)
    return [tuple(found) for found in json.loads(done.stdout)]


@in_own_network
def test_addresses_follow_the_ways_out():
    assert inside(
        ([], False),
        (["addr add 192.168.1.5/24 dev net0", "route add default via 192.168.1.1"], False),
        (["addr add 10.9.9.9/24 dev net0"], False),  # no way out begins there
        (["addr add 2003:1::5/64 dev net0 nodad", "-6 route add default dev net0"], False),
    ) == [(), ("192.168.1.5",), ("192.168.1.5",), ("2003:1::5", "192.168.1.5")]


@in_own_network
def test_network_without_a_way_out_has_its_own_addresses():
    rounds = (["addr add 10.7.0.5/24 dev net0", "addr add fd07::5/64 dev net0 nodad"], False)
    assert inside(rounds) == [("10.7.0.5", "fd07::5")]


@in_own_network
def test_second_network_leaves_the_first_ones_address():
    """An address is added with a better way out; then the first one is taken away."""
    first = ["addr add 192.168.1.5/24 dev net0", "route add default via 192.168.1.1 metric 200"]
    second = ["addr add 10.0.0.7/8 dev net1", "route add default via 10.0.0.1 metric 100"]
    assert inside((first, True), (second, True), (["addr del 192.168.1.5/24 dev net0"], True)) == [
        ("192.168.1.5",),
        ("10.0.0.7",),
        ("10.0.0.7", "gone", "192.168.1.5"),
    ]


@in_own_network
@pytest.mark.skipif(shutil.which("sysctl") is None, reason="sysctl is missing")
def test_lasting_address_goes_before_a_temporary_one():
    settings = ("use_tempaddr=2", "accept_dad=0")  # the kernel makes temporary addresses, and uses them at once
    rounds = (["addr add 2003:1::5/64 dev net0 mngtmpaddr nodad", "-6 route add default dev net0"], False)
    assert inside(rounds, settings=settings) == [("2003:1::5",)]


@in_own_network
def test_changed_address_is_noticed_and_a_gap_is_not():
    first, second = "addr add 192.168.1.5/24 dev net0", "addr add 10.0.0.7/8 dev net0"
    assert inside(([first], True), (["addr flush dev net0", second], True)) == [
        ("192.168.1.5",),
        ("10.0.0.7", "gone", "192.168.1.5"),
    ]


@pytest.mark.parametrize(
    ("listens", "dialled"),
    [
        ("::", ("10.0.0.7:5", "[2003:1::7]:5")),
        ("0.0.0.0", ("10.0.0.7:5",)),
        ("127.0.0.1", ("127.0.0.1:5",)),
        ("::1", ("[::1]:5",)),
    ],
)
def test_listener_is_dialled_at_the_families_it_takes(monkeypatch, listens, dialled):
    monkeypatch.setattr(addresses, "own_addresses", lambda: THERE)
    assert dialled_at(Tcp(listens, 5)) == dialled


def test_without_a_network_a_listener_is_dialled_at_loopback(monkeypatch):
    monkeypatch.setattr(addresses, "own_addresses", lambda: ())
    assert dialled_at(Tcp("::", 5)) == ("127.0.0.1:5",)


# Changes


def watch():
    return Watch(HERE, wall=1000.0, monotonic=50.0, slept_s=10.0)


def looks(*found, held=()):
    """The changes that a watch tells, a look each 3 s. found: the ways out. held: at each look, beside them."""
    looking, held = watch(), held or [()] * len(found)
    return [
        looking.look(ways, beside, 1003.0 + 3 * i, 53.0 + 3 * i)
        for i, (ways, beside) in enumerate(zip(found, held, strict=True))
    ]


def test_same_addresses_are_no_change():
    assert looks(HERE) == [None]


def test_other_addresses_are_one_change():
    assert looks(THERE, THERE) == [Change(THERE, gone=HERE), None]


def test_network_that_comes_back_the_same_is_no_change():
    assert looks((), HERE) == [None, None]


def test_address_that_is_held_beside_the_new_way_out_is_not_gone():
    assert looks(THERE, THERE, held=[HERE, HERE]) == [Change(THERE), None]


def test_former_way_out_that_goes_later_is_a_change():
    assert looks(THERE, THERE, THERE, held=[HERE, (), ()]) == [Change(THERE), Change(THERE, gone=HERE), None]


def test_address_that_nothing_used_may_go():
    assert looks(HERE, HERE, held=[THERE, ()]) == [None, None]


def test_only_what_is_gone_or_asleep_breaks_connections():
    changes = (Change(THERE), Change(THERE, gone=HERE), Change(HERE, slept_s=3600.0))
    assert [change.breaks_connections for change in changes] == [False, True, True]


def test_sleep_is_a_change_once_there_is_a_network():
    looking = watch()
    assert looking.look((), (), 4603.0, 53.0) is None
    assert looking.look(HERE, HERE, 4606.0, 56.0) == Change(HERE, slept_s=3600.0)
    assert looking.look(HERE, HERE, 4609.0, 59.0) is None


def test_slow_clock_is_no_sleep():
    looking = watch()
    for step in range(1, 100):
        assert looking.look(HERE, HERE, 1000.0 + 3.2 * step, 50.0 + 3.0 * step) is None


def test_busy_machine_is_no_sleep():
    assert watch().look(HERE, HERE, 1060.0, 110.0) is None


def following(*found, naps=None):
    """Changes of these ways out, one after the other."""
    ways = iter(found)

    async def sleep(seconds):
        naps.append(seconds)

    return changes(lambda: next(ways), tuple, wall=lambda: 0.0, monotonic=lambda: 0.0, sleep=sleep)


async def test_watcher_yields_changes_as_they_come():
    naps = []
    watching = following(HERE, HERE, THERE, THERE, HERE, naps=naps)
    assert await anext(watching) == Change(THERE, gone=HERE)
    assert await anext(watching) == Change(HERE, gone=THERE)
    assert naps == [AddressLimits().every_s] * 3
    await watching.aclose()


async def test_change_before_the_first_step_is_noticed():
    assert await anext(following(HERE, THERE)) == Change(THERE, gone=HERE)
