"""A health page on loopback, of swarms that tests make up: the real pages and models, without a swarm behind them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import sin
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from starlette.middleware.gzip import GZipMiddleware

from swarm.dht.records import Announcement, Mooring
from swarm.identity import Identity
from swarm.monitor import pages
from swarm.monitor.anchors import ToldLoad
from swarm.monitor.app import Headers
from swarm.monitor.assess import Assessment, Contact, Sighting, assess
from swarm.monitor.state import (
    Finding,
    GatewayState,
    History,
    ModelDetail,
    Point,
    ProbeStats,
    Quantiles,
    Reading,
    ServerAudits,
    Way,
    Window,
)
from swarm.protocol.meeting import SPEED_MAX, AnchorLoad
from tests.dht.support import announcement

NOW = 1_790_000_000.0
JOIN = "/dns4/join.example.org/tcp/31337/p2p/12D3KooWSrKnMZUcSxK8G7wmBbXdU8nFEfWGhLu6H8xjn8LmCSJb"
MARKUP = "<img src=x onerror=alert(1)>"
GATEWAYS = (
    GatewayState(url="https://gateway.example.org", ready=True, reason="", routed=("org/a",), version="0.2.0"),
    GatewayState(
        url=f"https://{'a-long-name.' * 9}org",
        ready=False,
        reason="models have no route",
        routed=(),
        unrouted=(f"organisation/{'A-Long-Name-' * 9}", MARKUP),
    ),
)
WAYS: tuple[Way, ...] = ("direct", "direct", "punched", "direct", "relayed")
FINDINGS: tuple[Finding, ...] = ("agreed", "agreed", "doubted", "agreed", "wrong", "open")
DEVICES = ("NVIDIA GeForce RTX 4090", "NVIDIA L4", "cpu", "Apple M3 Max", "NVIDIA A100-SXM4-80GB")


def key(n: int) -> Identity:
    return Identity(n.to_bytes(32, "big"))


def anchor(n: int) -> Mooring:
    """Most are in one network, and one has a long name."""
    host = "a-volunteers-machine.at-home.a-long-name-of-a-provider.org" if n % 4 == 2 else f"203.0.113.{n}"
    return Mooring(key(900 + n).public_key.hex(), "cd" * 32, f"{host}:31336")


def load(n: int) -> AnchorLoad:
    """The second one relays nothing, and the third one boasts."""
    many, fast = (1 << 20, SPEED_MAX) if n == 2 else (0, 0)
    return AnchorLoad(
        moored=many or 12 + n,
        moored_max=1024,
        meetings=1,
        meetings_max=512,
        pairs=many or 3 * n,
        pairs_max=128,
        relayed_bytes_per_s=fast or 120_000 * (1 + n),
        relayed_bytes_per_s_max=fast or (0 if n == 1 else 16 << 20),
        refused=7,
    )


def record(n: int, start: int, stop: int, **changes: Any) -> Announcement:
    facts: dict[str, Any] = {
        "decode_tps": 12.0 + n % 70,
        "prefill_tps": 700.0 + 13 * (n % 50),
        "free_tokens": 8192 * (1 + n % 5),
        "device": DEVICES[n % len(DEVICES)],
        "public_name": ("", f"volunteer-{n % 40}", "Kästner's cellar", "the university of somewhere far away, rack 12")[
            n % 4
        ],
        "version": "0.1.0" if n % 7 else "0.0.9",
        "numeric_class": "bfloat16",
        "network": "public",
        "anchors": tuple(anchor(a) for a in {n % 3, n % 4}) if n % 3 else (),
    }
    return announcement(key(n), start, stop, **{"now": NOW - 5, **facts, **changes})


def assessment(records: list[Announcement], silent: frozenset[int] = frozenset(), **changes: Any) -> Assessment:
    """Assess records of which all answer but those of the keys in silent."""
    dead = {key(n).public_key.hex() for n in silent}
    contacts = {
        r.public_key: Contact(first_seen=NOW - 3600 * (1 + i % 90))
        if r.public_key in dead
        else Contact(
            first_seen=NOW - 3600 * (1 + i % 90), answered_at=NOW - i % 30, rtt_ms=10.0 + i % 50, way=WAYS[i % 5]
        )
        for i, r in enumerate(records)
    }
    sighting = Sighting(
        network="public",
        records=records,
        contacts=contacts,
        reading=Reading(at=NOW, took_s=0.8),
        join_addresses=(JOIN,),
        loads={key(900 + n).peer_id: ToldLoad(NOW - 9, load(n)) for n in range(40) if n % 4 != 3},
    )
    facts = {name: getattr(sighting, name) for name in Sighting.__dataclass_fields__}
    return assess(Sighting(**{**facts, **changes}), NOW)


def one_model(name: str = "org/Meadow-70B-Instruct", blocks: int = 80) -> Assessment:
    """Eighty blocks: most held twice or more, some once, some by servers that are silent, two by nobody."""
    spans = [(0, 20), (0, 24), (10, 34), (20, 44), (24, 48), (44, 60), (48, 60), (60, 68), (68, 74), (74, 78)]
    records = [record(n, a, b, model=name, n_blocks=blocks) for n, (a, b) in enumerate(spans, start=1)]
    records.append(record(30, 60, 66, model=name, n_blocks=blocks, public_name=MARKUP, version=MARKUP, device=MARKUP))
    records.append(record(31, 40, 50, model=name, n_blocks=blocks, state="draining", public_name="leaving soon"))
    return assessment(records, silent=frozenset({9}), gateways=GATEWAYS, audits=audits_of(records))


def audits_of(records: list[Announcement]) -> dict[tuple[str, str], ServerAudits]:
    """Audits of all kinds."""
    found = {}
    for n, record in enumerate(records[:9]):
        finding = FINDINGS[n % len(FINDINGS)]
        agreed = 0 if finding == "open" else 40 - n
        found[record.root, record.peer_id] = ServerAudits(
            audited=40,
            agreed=agreed,
            last_at=NOW - 60 * n,
            finding=finding,
            wrong_at=NOW - 60 * n if finding == "wrong" else None,
        )
    return found


def healthy(**changes: Any) -> Assessment:
    records = [
        record(n, a, a + 20, model="org/Meadow-70B-Instruct", n_blocks=80) for n, a in enumerate((0, 20, 40, 60) * 3, 1)
    ]
    probes = ProbeStats(
        window="24h",
        attempts=288,
        success_rate=0.993,
        ttft_ms=Quantiles(p50=410.0, p95=980.5),
        inter_token_ms=Quantiles(p50=61.0, p95=120.25),
    )
    return assessment(records, probes={"ab" * 32: (probes,)}, **changes)


def crowd(servers: int = 1000, models: int = 20) -> Assessment:
    """Half of all servers host the first model, and the others share the rest."""
    records = []
    for n in range(1, servers + 1):
        m = 0 if n % 2 else n // 2 % (models - 1) + 1
        start = n * 7 % 76
        facts: dict[str, Any] = {"root": f"{m:02x}" * 32, "model": f"org/model-{m}-with-a-longer-name", "n_blocks": 80}
        facts["anchors"] = (anchor(n % 40),)
        records.append(record(n, start, min(80, start + 4 + n % 9), **facts))
    return assessment(records, silent=frozenset(range(5, servers, 11)))


def history(root: str | None, window: Window) -> History:
    step = 120.0 if window == "24h" else 3600.0
    points = tuple(
        Point(
            at=NOW - step * (720 - i),
            coverage=1.0 if i < 640 else 0.95,
            servers_online=12 + round(4 * sin(i / 60)),
            decode_tps=None if 300 < i < 330 else 20 + 3 * sin(i / 20),
            prefill_tps=1400 + 300 * sin(i / 45),
            free_tokens=60000.0,
            healthy=1.0 if i < 640 else 0.0,
        )
        for i in range(720)
    )
    return History(root=root, window=window, step_s=step, points=points)


@dataclass
class Site:
    """What the page shows; `show` replaces it, as a new reading of the swarm does."""

    now: Assessment
    revision: int = 1
    url: str = ""
    closing: bool = False

    def show(self, new: Assessment) -> None:
        self.revision += 1
        self.now = Assessment(new.state.model_copy(update={"revision": self.revision}), new.details)

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_middleware(GZipMiddleware)
        app.add_middleware(Headers)

        def get_detail(root: str) -> ModelDetail | None:
            return self.now.details.get(root)

        async def get_history(root: str | None, window: Window) -> History:
            return history(root, window)

        app.include_router(pages.router(lambda: self.now.state, get_detail, get_history))

        @app.get("/api/v1/history")
        async def api_history(root: str, window: Window = "24h") -> History:
            return history(root, window)

        @app.get("/api/v1/state")
        async def api_state() -> Any:
            return self.now.state

        @app.get("/api/v1/events")
        async def events() -> StreamingResponse:
            return StreamingResponse(self.stream(), media_type="text/event-stream")

        return app

    async def stream(self) -> AsyncIterator[str]:
        told = None
        yield "retry: 500\n\n"
        while not self.closing:
            if told != self.revision:
                told = self.revision
                yield f"id: {told}\nevent: state\ndata: {self.now.state.model_dump_json()}\n\n"
            await asyncio.sleep(0.1)


@contextmanager
def serving(site: Site, port: int = 0) -> Iterator[Site]:
    """Serve on loopback, in a thread of its own."""
    config = uvicorn.Config(site.app(), host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            thread.join(0.02)
            assert thread.is_alive(), "the page's server ended"
        site.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield site
    finally:
        site.closing = True
        server.should_exit = True
        thread.join(10)
