"""Writes example.json: what the API's models look like, for whoever builds upon them. Run as a script."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from swarm.dht.records import Announcement, Mooring
from swarm.identity import Identity
from swarm.monitor.anchors import ToldLoad
from swarm.monitor.assess import Assessment, Contact, Sighting, assess
from swarm.monitor.state import History, Point, ProbeStats, Quantiles, Reading, ServerAudits
from swarm.protocol.meeting import AnchorLoad
from tests.dht.support import announcement

NOW = 1_790_000_000.0
EXAMPLE = Path(__file__).with_name("example.json")


def peer(n: int) -> Identity:
    return Identity(bytes([n]) * 32)


ANCHOR = Mooring(peer(8).public_key.hex(), "cd" * 32, "203.0.113.5:31336")


def record(n: int, start: int, stop: int, **changes: Any) -> Announcement:
    rates: dict[str, Any] = {"decode_tps": 40.0, "prefill_tps": 900.0, "free_tokens": 4096, "device": "cpu"}
    return announcement(peer(n), start, stop, **{"now": NOW - 5, **rates, **changes})


def example() -> Assessment:
    """Two models: one that works, with markup for a name, and one with gaps."""
    records = [
        record(1, 0, 6, public_name="<b>alice</b>", device="NVIDIA L4"),
        record(2, 6, 12, public_name="bob", load=2.0, addresses=(), anchors=(ANCHOR,)),
        record(3, 4, 12, version="0.0.9", state="draining"),
        record(4, 0, 4, root="cd" * 32, model="org/other", n_blocks=8),
        record(5, 4, 6, root="cd" * 32, model="org/other", n_blocks=8),
    ]
    answered = Contact(first_seen=NOW - 3600, answered_at=NOW - 12, rtt_ms=18.5, way="direct")
    contacts = {record.public_key: answered for record in records[:4]}
    contacts[records[1].public_key] = replace(answered, way="punched")
    contacts[records[4].public_key] = Contact(first_seen=NOW - 60)
    probes = (
        ProbeStats(
            window="24h",
            attempts=288,
            success_rate=0.99,
            ttft_ms=Quantiles(p50=410.0, p95=980.5),
            inter_token_ms=Quantiles(p50=61.0, p95=120.25),
        ),
    )
    load = AnchorLoad(
        moored=3,
        moored_max=1024,
        meetings=1,
        meetings_max=512,
        pairs=2,
        pairs_max=128,
        relayed_bytes_per_s=120_000,
        relayed_bytes_per_s_max=16_777_216,
        refused=5,
    )
    sighting = Sighting(
        network="public",
        records=records,
        contacts=contacts,
        probes={"ab" * 32: probes},
        reading=Reading(at=NOW, took_s=0.8),
        join_addresses=("/dns4/join.example.org/tcp/31337/p2p/" + peer(9).peer_id,),
        loads={peer(8).peer_id: ToldLoad(NOW - 9, load)},
        audits={
            ("ab" * 32, peer(1).peer_id): ServerAudits(audited=40, agreed=40, last_at=NOW - 240, finding="agreed"),
            ("ab" * 32, peer(3).peer_id): ServerAudits(
                audited=13, agreed=12, last_at=NOW - 900, finding="wrong", wrong_at=NOW - 900
            ),
        },
        revision=7,
    )
    return assess(sighting, NOW)


def example_json() -> str:
    assessment = example()
    points = tuple(
        Point(
            at=NOW - 120 * (3 - i),
            coverage=1.0,
            servers_online=3.0,
            decode_tps=30.0,
            prefill_tps=900.0,
            free_tokens=4096.0,
            healthy=1.0,
        )
        for i in range(3)
    )
    history = History(root="ab" * 32, window="24h", step_s=120.0, points=points)
    state = assessment.state.model_dump(mode="json")
    whole = {
        "/api/v1/state": state,
        "/api/v1/models/{root}": {root: detail.model_dump(mode="json") for root, detail in assessment.details.items()},
        "/api/v1/history?root=ROOT&window=24h": history.model_dump(mode="json"),
        "/api/v1/events": "retry: 5000\n\nid: 7\nevent: state\ndata: <the state in one line>\n\n: still here\n\n",
    }
    return json.dumps(whole, indent=1) + "\n"


if __name__ == "__main__":
    EXAMPLE.write_text(example_json())
