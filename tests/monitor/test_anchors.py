"""Anchors and ways on the page: which anchors are asked, what of their claims is shown, and all of it over sockets."""

import asyncio
import re
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs pip install 'swarm-inference[health]'")

from swarm.dht.records import Announcement, Mooring
from swarm.errors import AnchorBusy, Unreachable
from swarm.identity import Identity
from swarm.monitor.anchors import ToldLoad, named, place_of, states
from swarm.monitor.contacts import Answer, ContactLimits, Contacts, Loads, SwarmDialler
from swarm.monitor.state import API, State
from swarm.net.address import ViaAnchor
from swarm.net.load import LoadLimits
from swarm.net.relay import RelayLimits
from swarm.net.traversal import Traversal, TraversalLimits
from swarm.protocol.meeting import AnchorLoad
from tests.dht.support import announcement
from tests.monitor.page_support import NOW, anchor, key, load
from tests.monitor.test_app import World, running
from tests.net.places import Place, limits, places

FAR = "198.51.100.7:31336"


def hidden(n: int, *anchors: Mooring) -> Announcement:
    return announcement(key(n), 0, 12, now=NOW - 5, addresses=(), anchors=anchors)


def keys(*records: Announcement) -> list[str]:
    return [record.public_key for record in records]


# --- which are asked -------------------------------------------------------------------------------------------------


def test_anchors_of_most_servers_that_answer_come_first():
    few, many = hidden(1, anchor(0)), [hidden(n, anchor(1), anchor(2)) for n in (2, 3)]
    liars = [hidden(n, anchor(3)) for n in range(10, 20)]
    found = named([few, *many, *liars], keys(few, *many))
    assert [each.servers for each in found] == [2, 2, 1, 0]
    assert found[2].peer == key(900).peer_id
    assert found[3].peer == key(903).peer_id


def test_a_server_counts_once_for_an_anchor():
    twice = [hidden(1, anchor(0)), hidden(1, anchor(0)).model_copy(update={"blocks": (4, 8)})]
    (found,) = named(twice, keys(*twice))
    assert found.servers == 1


def test_a_flood_of_named_anchors_leaves_out_those_of_silent_servers():
    honest = hidden(1, anchor(0))
    liars = [hidden(n, *(anchor(3 * n + i) for i in range(3))) for n in range(2, 2 + API.anchors_max)]
    found = named([*liars, honest], keys(honest))
    assert len(found) == API.anchors_max
    assert found[0].peer == key(900).peer_id


def test_an_address_that_fewer_servers_name_comes_later():
    wrong = Mooring(key(900).public_key.hex(), "cd" * 32, FAR)
    records = [hidden(1, wrong), hidden(2, anchor(0)), hidden(3, anchor(0))]
    (found,) = named(records, keys(*records))
    assert [str(way.at) for way in found.ways] == ["203.0.113.0:31336", FAR]


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_an_old_load_is_not_shown():
    found = named([hidden(1, anchor(0))], keys(hidden(1)))
    loads = {key(900).peer_id: ToldLoad(NOW - 75, load(0))}
    assert states(found, loads, NOW - 75)[0].load.moored == 12
    assert states(found, loads, NOW - 74)[0].load is None


def test_anchors_that_only_silent_servers_name_are_shown_once_they_tell():
    found = named([hidden(1, anchor(0))], ())
    assert states(found, {}, NOW) == ()
    assert states(found, {key(900).peer_id: ToldLoad(NOW, load(0))}, NOW)[0].servers == 0


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("203.0.113.5", "203.0.*.*"),
        ("2001:db8:1:2::3", "2001:db8:*"),
        ("::1", "0:0:*"),
        ("a.b.example.org", "*.example.org"),
        ("example.org", "*.org"),
        ("localhost", "*"),
    ],
)
def test_the_place_of_an_anchor_is_no_address(host, shown):
    assert place_of(host) == shown


async def test_state_and_metrics_tell_ways_and_loads_and_no_address(tmp_path):
    world = World(tmp_path)
    try:
        ways = ("direct", "punched", "relayed")
        moorings = (anchor(0), Mooring(key(901).public_key.hex(), "cd" * 32, FAR), anchor(3))
        for way in ways:
            me = await world.announce(0, 12, addresses=(), anchors=moorings)
            world.ways[me.public_key.hex()] = way
        world.loads = {key(900).peer_id: load(0), key(901).peer_id: load(1)}
        async with running(world) as client:
            await world.until(lambda state: state.servers_online == 3 and any(a.load for a in state.anchors))
            body, metrics = (await client.get("/api/v1/state")).text, (await client.get("/metrics")).text
    finally:
        world.database.close()
    state = State.model_validate_json(body)
    assert dict(state.ways) == {"direct": 1, "reverse": 0, "punched": 1, "relayed": 1}
    figures = {a.peer_id: (a.network, a.servers, a.load and a.load.moored) for a in state.anchors}
    assert figures == {
        key(900).peer_id: ("203.0.*.*", 3, 12),
        key(901).peer_id: ("198.51.*.*", 3, 13),
        key(903).peer_id: ("203.0.*.*", 3, None),
    }
    assert not re.search(r"203\.0\.113|198\.51\.100|31336", body + metrics)
    for line in (
        'swarm_servers_by_way{way="punched"} 1.0',
        "swarm_anchors 2.0",
        "swarm_anchors_moored 25.0",
        "swarm_anchors_relayed_bytes_per_second 360000.0",
        "swarm_anchors_relayed_bytes_per_second_max 1.6777216e+07",
    ):
        assert line in metrics.splitlines()
    assert key(900).peer_id not in metrics, "strangers must not fill a database with series"


# --- over sockets ----------------------------------------------------------------------------------------------------


def record_of(place: Place, *anchors: Place) -> Announcement:
    """A server's record: of its address, or of the anchors at which it is moored."""
    moorings = [
        Mooring(at.me.identity.public_key.hex(), at.me.key.public.hex(), str(at.ways.listener.address))
        for at in anchors
    ]
    addresses = () if anchors else (str(place.ways.listener.address),)
    mine = {"addresses": addresses, "anchors": tuple(moorings), "channel_key": place.me.key.public.hex()}
    return announcement(place.me.identity, 0, 12, network="public", **mine)


@asynccontextmanager
async def dialler(bounds: TraversalLimits | None = None) -> Any:
    made = SwarmDialler(Identity.generate(), "public")
    made._traversal = Traversal(made._me, limits=bounds)
    try:
        yield made
    finally:
        await made.close()


async def test_the_monitor_notes_the_way_to_each_server_and_the_load():
    fresh = LoadLimits(fresh_s=0.0)
    async with places() as made, dialler() as real, dialler(limits(punch=False)) as unlucky:
        anchor = await made.place(limits(relay=RelayLimits(bytes_per_s=1e6), load=fresh))
        servers = [await made.place(), await made.hidden(anchor), await made.hidden(anchor, bounds=limits(punch=False))]
        records = [record_of(servers[0]), *(record_of(server, anchor) for server in servers[1:])]
        known, loads = {}, Loads(real, time.time)
        for by, some in ((real, records[:2]), (unlucky, records[2:])):
            contacts = Contacts(by, time.time)
            await contacts.visit(some)
            known |= contacts.known
        assert [known[record.public_key].way for record in records] == ["direct", "punched", "relayed"]
        await loads.visit(records, keys(*records))
        told = loads.known[anchor.me.identity.peer_id].load
        assert (told.moored, told.relayed_bytes_per_s_max) == (2, 1_000_000)
        assert told.relayed_bytes_per_s > 0, "the handshake with the third server"


async def test_a_busy_anchor_says_nothing_of_a_server() -> None:
    class Dialler:
        def __init__(self) -> None:
            self.asked: list[str] = []

        async def greet(self, record: Any) -> Answer:
            self.asked.append(record.public_key)
            if len(self.asked) > 3:
                raise AnchorBusy(record.peer_id, ("192.0.2.1:1",), 0.0, "as an anchor: too many calls")
            if record.public_key == "c":
                raise Unreachable(record.peer_id, (), 0.0)
            return Answer(0.01, "relayed")

        async def load_of(self, anchor: object) -> Any:
            raise AssertionError(anchor)

    clock, dialler = iter(range(1, 100)), Dialler()
    contacts = Contacts(dialler, lambda: float(next(clock)), ContactLimits(dials_max=1))
    some: Any = [SimpleNamespace(public_key=key, peer_id=key) for key in "abc"]
    for _ in range(2):
        await contacts.visit(some)
    failures = {key: contact.failures for key, contact in contacts.known.items()}
    assert failures == {"a": 0, "b": 0, "c": 1}
    assert "c" in dialler.asked[3:5], "the one that has not answered waits for no other"


async def test_strangers_that_do_not_answer_delay_no_known_server() -> None:
    records = [announcement(Identity.generate(), 0, 4) for _ in range(200)]
    silent = {record.public_key for record in records[1:]}

    class Dialler:
        async def greet(self, record: Announcement) -> Answer:
            if record.public_key in silent:
                await asyncio.sleep(3600)
            return Answer(0.001, "direct")

        async def load_of(self, anchor: ViaAnchor) -> AnchorLoad:
            raise AssertionError

    contacts = Contacts(Dialler(), time.time, ContactLimits(strangers_s=0.1, pace_s=0.0))
    for _ in range(40):  # until the one that answers has been drawn
        await contacts.visit(records)
        if contacts.known[records[0].public_key].answered_at:
            break
    before = contacts.known[records[0].public_key].answered_at
    assert before
    async with asyncio.timeout(5):
        await contacts.visit(records)
    assert contacts.known[records[0].public_key].answered_at > before
    assert not any(contacts.known[key].failures for key in silent)  # they had no time to fail
