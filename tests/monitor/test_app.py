"""The API: what it answers, that strangers' texts stay texts, and that no request makes it fail."""

import asyncio
import json
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytest.importorskip("fastapi", reason="needs pip install 'swarm-inference[health]'")
pytest.importorskip("schemathesis", reason="needs pip install 'swarm-inference[dev]'")

import httpx
import schemathesis

from swarm.dht.directory import Directory, ModelEntry
from swarm.dht.records import Announcement
from swarm.dht.store import MemoryStore
from swarm.errors import Unreachable
from swarm.identity import Identity
from swarm.monitor.app import events_of, make_app
from swarm.monitor.assess import KnownModel
from swarm.monitor.contacts import Answer, ContactLimits
from swarm.monitor.gateways import GatewayLimits
from swarm.monitor.history import Database, ProbeResult
from swarm.monitor.reading import choose
from swarm.monitor.service import Knowledge, Monitor, MonitorLimits, MonitorOptions
from swarm.monitor.state import API, Health, History, ModelDetail, State, Way
from swarm.net.address import ViaAnchor
from swarm.protocol.meeting import AnchorLoad
from tests.dht.support import NETWORK, ROOT, announcement

DEPLOY = Path(__file__).parents[2] / "deploy"
MARKUP = "<script>alert('x')</script>"
ABSENT = "ee" * 32


class World:
    """A monitor over a DHT in memory. silent: public keys of servers that do not answer. ways: to those that do.

    loads: that anchors tell, by peer id.
    """

    def __init__(self, folder: Path, gateways: tuple[str, ...] = ()) -> None:
        self.memory = MemoryStore.make(NETWORK, time.time)
        self.reachable = True
        self.silent: set[str] = set()
        self.ways: dict[str, Way] = {}
        self.loads: dict[str, AnchorLoad] = {}
        self.database = Database(folder / "health.sqlite")
        contacts = ContactLimits(again_s=0.01)
        limits = MonitorLimits(
            read_every_s=0.05,
            retry_s=0.05,
            event_clients_max=1,
            contacts=contacts,
            gateways=GatewayLimits(every_s=0.05),
        )
        options = MonitorOptions(network=NETWORK, gateways=gateways, limits=limits)
        self.monitor = Monitor(options, self.open, self, self.database, time.time)
        self.app = make_app(self.monitor)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        yield self

    alive = True

    @property
    def gate(self) -> Any:
        return self.memory.gate

    async def get(self, keys: Any, heard: Any = None, sample: Any = None) -> Any:
        if not self.reachable:
            raise Unreachable("the swarm", ("/ip4/203.0.113.9/tcp/1/p2p/x",), 1.0)
        return await self.memory.get(keys, heard)

    async def greet(self, record: Announcement) -> Answer:
        if record.public_key in self.silent:
            raise Unreachable(record.peer_id, record.addresses, 1.0)
        return Answer(0.002, self.ways.get(record.public_key, "direct"))

    async def load_of(self, anchor: ViaAnchor) -> AnchorLoad:
        if anchor.peer not in self.loads:
            raise Unreachable(anchor.peer, (str(anchor),), 1.0)
        return self.loads[anchor.peer]

    async def announce(self, start: int, stop: int, **changes: Any) -> Identity:
        me = Identity.generate()
        directory = Directory(self.memory, identity=me, network=NETWORK, clock=time.time)
        await directory.announce(announcement(me, start, stop, **{"free_tokens": 100, **changes}))
        return me

    async def until(self, holds: Any) -> State:
        async with asyncio.timeout(20):
            while not holds(self.monitor.board.published.assessment.state):
                await asyncio.sleep(0.02)
        return self.monitor.board.published.assessment.state


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.database.close()


@asynccontextmanager
async def running(world: World) -> AsyncIterator[httpx.AsyncClient]:
    life = asyncio.create_task(world.monitor.run())
    transport = httpx.ASGITransport(world.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://page") as client:
        try:
            yield client
        finally:
            world.monitor.board.stop()
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)


async def test_state_models_history_and_health_are_what_the_schema_says(world):
    await world.announce(0, 6, public_name="alice", decode_tps=30.0)
    await world.announce(6, 12)
    async with running(world) as client:
        await world.until(lambda state: state.models and state.models[0].status == "healthy")
        state = State.model_validate_json((await client.get("/api/v1/state")).content)
        detail = ModelDetail.model_validate_json((await client.get(f"/api/v1/models/{ROOT}")).content)
        history = History.model_validate_json((await client.get(f"/api/v1/history?root={ROOT}")).content)
        health = Health.model_validate_json((await client.get("/healthz")).content)
        unknown = await client.get(f"/api/v1/models/{ABSENT}")
    assert (state.servers_online, state.models[0].missing_blocks) == (2, ())
    assert {server.blocks for server in detail.servers} == {(0, 6), (6, 12)}
    assert history.root == ROOT
    assert (health.ok, health.history, health.probe) == (True, "ok", "off")
    assert unknown.status_code == 404


async def test_a_server_that_stops_answering_breaks_its_model_before_its_record_expires(world):
    await world.announce(0, 6)
    gone = await world.announce(6, 12)
    async with running(world) as client:
        await world.until(lambda state: state.models and state.models[0].status == "healthy")
        world.silent.add(gone.public_key.hex())
        await world.until(lambda state: state.models[0].status == "broken")
        body = (await client.get("/api/v1/state")).json()
    assert body["models"][0]["missing_blocks"] == [6, 7, 8, 9, 10, 11]
    assert body["models"][0]["reasons"] == ["no server answers for blocks 6:12"]


async def test_markup_in_names_and_versions_is_text_everywhere(world):
    await world.announce(0, 12, public_name=MARKUP, version="<b>1</b>", model="<i>m</i>")
    async with running(world) as client:
        await world.until(lambda state: state.servers_online == 1)
        for path in ("/api/v1/state", f"/api/v1/models/{ROOT}", "/metrics", f"/badge/{ROOT}.svg"):
            answer = await client.get(path)
            assert answer.headers["x-content-type-options"] == "nosniff", path
            assert not answer.headers["content-type"].startswith("text/html"), path
        assert MARKUP in (await client.get("/api/v1/state")).json()["contributors"][0]["name"]
        assert "<script" not in (await client.get(f"/badge/{ROOT}.svg")).text
        assert "MODEL --root" in (await client.get(f"/api/v1/models/{ROOT}")).json()["join_command"]


async def test_the_page_outlives_whatever_a_reading_raises(world, monkeypatch):
    await world.announce(0, 12)
    asked, raised = Database.probe_stats, []

    def once(self, now):
        if not raised:
            raised.append(True)
            raise OverflowError("Python int too large to convert to SQLite INTEGER")
        return asked(self, now)

    monkeypatch.setattr(Database, "probe_stats", once)
    async with running(world):
        state = await world.until(lambda state: state.models and state.models[0].servers_online)
    assert raised
    assert state.models[0].servers_online == 1


def test_models_that_are_served_stay_in_mind_before_those_that_are_not():
    def summary(number, servers):
        return SimpleNamespace(root=f"{number:064x}", name="m", n_blocks=4, servers_online=servers)

    knowledge, honest = Knowledge(), summary(0, 3)
    knowledge.served([honest])
    knowledge.served([honest, *(summary(n, 1) for n in range(1, API.models_max))])
    knowledge.served([honest, *(summary(n, 1) for n in range(2, API.models_max + 1))])
    assert len(knowledge.known) == API.models_max
    assert honest.root in knowledge.known
    assert f"{1:064x}" not in knowledge.known


async def test_no_address_is_served_not_even_when_the_swarm_cannot_be_reached(world):
    await world.announce(0, 12, addresses=("198.51.100.7:4000",))
    async with running(world) as client:
        await world.until(lambda state: state.servers_online == 1)
        world.reachable = False
        await world.until(lambda state: state.reading.error is not None)
        paths = ("/api/v1/state", f"/api/v1/models/{ROOT}", "/metrics", "/healthz", "/api/v1/history")
        texts = [(await client.get(path)).text for path in paths]
    assert not re.search(r"198\.51|203\.0\.113|:4000", "".join(texts))
    assert "no node of the swarm answers" in texts[0]
    assert json.loads(texts[0])["servers_online"] == 1  # what was known stays, with its age


async def test_events_bring_the_state_and_are_bounded(world):
    await world.announce(0, 12)
    async with running(world) as client:
        await world.until(lambda state: state.servers_online == 1)
        stream = events_of(world.monitor.board)
        assert await anext(stream) == b"retry: 5000\n\n"
        events = [await anext(stream) for _ in range(2)]
        kinds = [event.splitlines()[1] for event in events]
        assert kinds == [b"event: state"] * 2
        revisions = [State.model_validate_json(event.splitlines()[2][6:]).revision for event in events]
        assert revisions[0] < revisions[1]
        assert (await client.get("/api/v1/events")).status_code == 503
        await stream.aclose()
        assert world.monitor.board.clients == 0


async def test_a_full_disk_keeps_the_page_alive_and_says_so(world, monkeypatch):
    await world.announce(0, 12)

    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(world.database, "_record", full)
    async with running(world) as client:
        await world.until(lambda state: state.servers_online == 1)
        async with asyncio.timeout(10):
            while (health := (await client.get("/healthz")).json())["history"] == "ok":
                await asyncio.sleep(0.02)
        assert "full" in health["history"]
        assert health["ok"] is True
        assert (await client.get("/api/v1/state")).json()["models"][0]["status"] == "healthy"


async def test_before_the_first_reading_the_page_is_there_and_not_healthy(world):
    world.reachable = False
    async with running(world) as client:
        await world.monitor.read_once()
        assert (await client.get("/healthz")).status_code == 503
        assert (await client.get("/api/v1/state")).json()["models"] == []


async def test_models_of_late_are_looked_up_first_and_a_flood_of_names_is_bounded(world):
    entries = [ModelEntry(f"m{i}", f"{i:064x}", 4096) for i in range(2 * API.models_max)]
    known = {entries[90].root: KnownModel("m90", 4096)}
    chosen = choose(entries, known)
    assert chosen[0] == entries[90]
    assert len(chosen) == API.models_max


async def test_a_flood_of_small_models_keeps_no_new_one_out_for_ever(world):
    flood = [ModelEntry(f"m{i}", f"{i:064x}", 1) for i in range(2 * API.models_max)]
    honest = ModelEntry("honest", ROOT, 12)
    assert any(honest in choose([honest, *flood], {}) for _ in range(100))


async def test_every_metric_of_the_dashboard_and_the_alerts_exists(world):
    await world.announce(0, 12, decode_tps=1.0, prefill_tps=1.0)
    world.database.record_probe(ProbeResult(ROOT, time.time(), True, 100.0, (5.0,))).result()
    async with running(world) as client:
        await world.until(lambda state: state.models and state.models[0].probes and state.models[0].decode_tps)
        text = (await client.get("/metrics")).text
    served = set(re.findall(r"^(swarm_\w+)[ {]", text, re.MULTILINE))
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    alerts = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    assert {"BlockWithoutServer", "GenerationsFail", "VersionSkew"} <= {rule["alert"] for rule in rules}
    for query in [*queries, *(rule["expr"] for rule in rules)]:
        assert set(re.findall(r"swarm_\w+", query)) <= served, query


def test_no_request_makes_it_fail(world):
    asyncio.run(_filled(world))
    schema = schemathesis.openapi.from_asgi("/api/v1/openapi.json", world.app)
    schema.config.generation.update(max_examples=20, deterministic=True)
    tried = set()
    for found in schema.exclude(path="/api/v1/events").get_all_operations():
        operation = found.ok()
        tried.add(operation.path)

        @schema_cases(operation)
        def check(case: Any) -> None:
            answer = case.call()
            assert answer.status_code < 500 or (answer.status_code == 503 and "detail" not in answer.json()), case
            case.validate_response(answer)

        check()
    assert len(tried) == 6


def schema_cases(operation: Any) -> Any:
    import hypothesis

    settings = hypothesis.settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    return lambda function: settings(hypothesis.given(case=operation.as_strategy())(function))


async def _filled(world: World) -> None:
    await world.announce(0, 12)
    async with running(world):
        await world.until(lambda state: state.servers_online == 1)
