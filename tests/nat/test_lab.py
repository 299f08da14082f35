"""The lab itself: delays, counters, and changes during a run."""

import socket

import pytest

from tests.nat.sockets import SILENT_S, WITHIN_S, connected, dial, listening, outcome, round_trip_s
from tests.support.lab import Lab

PORT = 7000
LATE_S = 0.03  # by which a packet may be late, on a busy machine


def test_a_round_trip_pays_both_delays_twice(lab: Lab):
    near, far = lab.public_host(delay_ms=10), lab.site("double", delay_ms=25).host()
    with listening(near, PORT):
        assert 0.070 <= round_trip_s(far, (near.address, PORT)) < 0.070 + LATE_S


def test_a_changed_delay_holds_at_once(lab: Lab):
    near, far = lab.public_host(), lab.site("public", delay_ms=100)
    host = far.host()
    far.set_delay(20)
    with listening(near, PORT):
        assert 0.040 <= round_trip_s(host, (near.address, PORT)) < 0.040 + LATE_S


def test_hosts_of_one_home_connect_without_hairpin(lab: Lab):
    home = lab.site("full_cone", delay_ms=50)
    one, two = home.host(), home.host()
    with listening(two, PORT):
        assert round_trip_s(one, (two.address, PORT)) < LATE_S
        assert outcome(one, (home.public_address, PORT)) != "connected"


def test_traffic_counts_the_bytes_between_two_sites(lab: Lab):
    home, anchor, peer = lab.site("port_restricted"), lab.site("public"), lab.site("public")
    anchor.host()
    callee = peer.host()
    with connected(home.host(), callee, (callee.address, PORT)) as (one, two):
        one.sendall(bytes(100_000))
        received = 0
        while received < 100_000:
            received += len(two.recv(100_000))
    assert 100_000 <= lab.traffic(home, peer) < 120_000
    assert 0 < lab.traffic(peer, home) < 20_000
    assert lab.traffic(home, anchor) == lab.traffic(anchor, peer) == 0


def test_renumbering_ends_what_a_router_translated(lab: Lab):
    home, callee = lab.site("port_restricted"), lab.public_host()
    caller = home.host()
    with connected(caller, callee, (callee.address, PORT)) as (one, two):
        before = two.getpeername()[0]
        after = home.renumber()
        two.sendall(b"lost")
        one.sendall(b"from an address that the other does not know")
        with pytest.raises(ConnectionResetError):
            one.recv(1)
    with connected(caller, callee, (callee.address, PORT)) as (_, two):
        assert two.getpeername()[0] == after != before


def test_renumbering_moves_a_public_host(lab: Lab):
    site, caller = lab.site("public"), lab.public_host()
    callee = site.host()
    before = callee.address
    with connected(caller, callee, (before, PORT)) as (one, two):
        site.renumber()
        one.sendall(b"lost")
        two.settimeout(SILENT_S)
        with pytest.raises(TimeoutError):
            two.recv(1)
    with listening(callee, PORT):
        assert outcome(caller, (before, PORT)) == "silent"
        assert outcome(caller, (callee.address, PORT)) == "connected"


def test_a_disconnected_site_hears_nothing_until_reconnected(lab: Lab):
    site, caller = lab.site("public"), lab.site("port_restricted").host()
    callee = site.host()
    with connected(caller, callee, (callee.address, PORT)) as (one, two):
        site.disconnect()
        one.sendall(b"x")
        two.settimeout(SILENT_S)
        with pytest.raises(TimeoutError):
            two.recv(1)
        site.reconnect()
        two.settimeout(None)
        assert two.recv(1) == b"x"  # sent anew by TCP


@pytest.mark.parametrize("kind", ["public", "port_restricted"])
def test_an_unplugged_host_has_no_network(lab: Lab, kind: str):
    callee, caller = lab.public_host(), lab.site(kind).host()
    with listening(callee, PORT):
        caller.unplug()
        with pytest.raises(OSError, match="unreachable"):
            dial(caller, (callee.address, PORT))
        caller.plug()
        dial(caller, (callee.address, PORT)).close()


def test_hosts_of_a_lan_hear_multicasts(lab: Lab):
    lan, group = lab.lan(), "224.0.0.251"
    one, two, three = (lan.host() for _ in range(3))
    with two.socket(socket.SOCK_DGRAM) as near, three.socket(socket.SOCK_DGRAM) as far:
        for host, heard in ((two, near), (three, far)):
            heard.bind(("", 5353))
            member = socket.inet_aton(group) + socket.inet_aton(host.address)
            heard.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
        with one.socket(socket.SOCK_DGRAM) as asking:
            asking.sendto(b"who?", (group, 5353))
        for heard in (near, far):
            heard.settimeout(WITHIN_S)
            said, source = heard.recvfrom(10)
            assert (said, source[0]) == (b"who?", one.address)


def test_two_labs_do_not_see_each_other(lab: Lab):
    with Lab() as other:
        host, same, stranger = lab.public_host(), other.public_host(), other.public_host()
        assert host.address == same.address
        with listening(host, PORT):
            assert outcome(stranger, (host.address, PORT)) == "refused"
            assert outcome(lab.public_host(), (host.address, PORT)) == "connected"
