"""What makes a model healthy, degraded or broken; and that the page's example is what the API gives."""

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest

from swarm.dht.records import Announcement
from swarm.monitor.assess import AssessLimits, Contact, KnownModel, Sighting, assess, ranges
from swarm.monitor.state import API, ModelDetail, ProbeStats, State, Ways
from tests.dht.support import ROOT
from tests.monitor.make_example import EXAMPLE, NOW, example_json, record

ANSWERS = Contact(first_seen=NOW - 100, answered_at=NOW - 10, rtt_ms=3.0, way="direct")


def detail(records: list[Announcement], contact: Contact = ANSWERS, **more: Any) -> ModelDetail:
    contacts = {record.public_key: contact for record in records}
    sighting = Sighting(**{"network": "test", "records": records, "contacts": contacts, **more})
    return assess(sighting, NOW).details[ROOT]


def test_a_model_whose_blocks_all_answer_is_healthy():
    summary = detail([record(1, 0, 6), record(2, 6, 12)]).summary
    assert (summary.status, summary.reasons, summary.missing_blocks, summary.coverage) == ("healthy", (), (), 1.0)
    assert summary.decode_tps == pytest.approx(20.0)  # two spans of 40 tokens a second, one behind the other
    assert summary.free_tokens == 4096


def test_claims_of_endless_memory_are_a_number_that_databases_take():
    found = detail([record(n, 0, 12, free_tokens=2**53 - 1) for n in range(1, 6)])
    assert found.summary.free_tokens == 2**53 - 1


def test_a_command_that_grows_too_long_does_not_name_the_model():
    addresses = tuple(f"/dns4/{'a' * 60}.example.org/tcp/{port}" for port in range(9000, 9008))
    found = detail([record(1, 0, 12, model="m" * 128)], join_addresses=addresses)
    assert len(found.join_command) <= API.command_chars
    assert shlex.split(found.join_command)[1] == "MODEL"


def test_blocks_that_nobody_announces_break_a_model_and_are_named():
    found = detail([record(1, 0, 4), record(2, 9, 12)])
    assert found.summary.status == "broken"
    assert found.summary.missing_blocks == (4, 5, 6, 7, 8)
    assert found.summary.reasons == ("no server announces blocks 4:9",)
    assert found.needed_blocks == (4, 9)
    assert [block.status for block in found.blocks][3:10] == ["single", *["missing"] * 5, "single"]


@pytest.mark.parametrize(
    "contact",
    [
        Contact(first_seen=NOW - 100),
        Contact(first_seen=NOW - 100, answered_at=NOW - AssessLimits().answer_lives_s - 1),
        Contact(first_seen=NOW - 100, answered_at=NOW - 40, failures=2),
    ],
    ids=["never", "long ago", "not any more"],
)
def test_a_record_alone_makes_nobody_online(contact):
    found = detail([record(1, 0, 12)], contact)
    assert found.summary.status == "broken"
    assert {block.status for block in found.blocks} == {"silent"}
    assert found.summary.servers_online == 0
    assert found.summary.reasons == ("no server answers for blocks 0:12",)


def test_one_failed_handshake_is_not_the_end():
    assert detail([record(1, 0, 12)], Contact(NOW - 100, NOW - 40, failures=1)).summary.status == "healthy"


def test_servers_that_drain_take_no_sessions():
    found = detail([record(1, 0, 12), record(2, 4, 8, state="draining")])
    assert found.summary.status == "healthy"
    alone = detail([record(1, 0, 4), record(3, 8, 12), record(2, 4, 8, state="draining")])
    assert alone.summary.status == "broken"
    assert alone.summary.missing_blocks == (4, 5, 6, 7)
    assert "take no new sessions" in alone.summary.reasons[0]


def test_servers_of_one_tier_are_counted_together():
    rounded = [record(n, 6, 12, numeric_class="bfloat16+int8") for n in (2, 3)]
    found = detail([record(1, 0, 8), *rounded])
    assert found.summary.status == "healthy"
    assert (found.summary.tier, found.summary.numeric_classes) == ("full", ("bfloat16+int8", "float32"))
    assert [block.online for block in found.blocks] == [1] * 6 + [3] * 2 + [2] * 4


def test_a_route_lies_within_one_tier():
    found = detail([record(1, 0, 8), record(2, 4, 12, numeric_class="bfloat16+nf4"), record(3, 0, 6)])
    assert found.summary.status == "broken"
    assert found.summary.missing_blocks == (8, 9, 10, 11)
    assert found.summary.reasons[1] == "blocks 8:12 have servers of another tier than full only"
    assert (found.summary.tier, found.summary.numeric_classes) == ("full", ("float32",))


def test_full_servers_and_failing_generations_degrade_a_model():
    full = detail([record(1, 0, 12, free_tokens=0)])
    assert (full.summary.status, full.summary.reasons) == ("degraded", ("all servers of some block are full",))
    failing = ProbeStats(window="24h", attempts=10, success_rate=0.5, ttft_ms=None, inter_token_ms=None)
    assert detail([record(1, 0, 12)], probes={ROOT: (failing,)}).summary.status == "degraded"


def test_expired_records_are_left_out_and_a_model_of_late_stays_broken():
    found = detail([record(1, 0, 12, now=NOW - 61)], known={ROOT: KnownModel("org/model", 12)})
    assert found.summary.status == "broken"
    assert found.summary.servers_announced == 0
    assert found.summary.missing_blocks == tuple(range(12))
    assert found.summary.name == "org/model"


def test_who_does_not_answer_decides_neither_name_nor_size():
    liars = [record(n, 0, 3, model="org/other", n_blocks=3) for n in range(5, 9)]
    honest = record(1, 0, 12)
    sighting = Sighting(network="test", records=[*liars, honest], contacts={honest.public_key: ANSWERS})
    summary = assess(sighting, NOW).details[ROOT].summary
    assert (summary.name, summary.n_blocks, summary.status) == ("org/model", 12, "healthy")


def test_servers_are_counted_by_the_way_to_them():
    records = [record(n, 0, 12) for n in range(1, 7)]
    ways = ("direct", "direct", "punched", "relayed", "reverse")
    contacts = {r.public_key: replace(ANSWERS, way=way) for r, way in zip(records, ways, strict=False)}
    contacts[records[5].public_key] = replace(ANSWERS, way="punched", failures=2)  # silent
    assessment = assess(Sighting(network="test", records=records, contacts=contacts), NOW)
    state = assessment.state
    assert state.ways == Ways(direct=2, reverse=1, punched=1, relayed=1)
    assert sum(count for _, count in state.ways) == state.servers_online == 5
    by_peer = {server.peer_id: server.way for server in assessment.details[ROOT].servers}
    assert [by_peer[r.peer_id] for r in records] == [*ways, "punched"]


@pytest.mark.parametrize("name", ["$(touch x)", "a; rm -rf /", "--token", "org/a b", "../x", "`x`", "a/b/c", "öl"])
def test_a_name_that_is_no_hub_id_never_gets_into_a_command(name):
    command = detail([record(1, 0, 12, model=name)]).join_command
    assert shlex.split(command)[:2] == ["swarm-serve", "MODEL"]
    assert name not in command


def test_the_command_names_the_blocks_that_are_needed_most_and_the_operators_address():
    command = detail([record(1, 0, 12), record(2, 0, 8)], join_addresses=("/ip4/1.2.3.4/tcp/1/p2p/Q",)).join_command
    assert command == (
        f"swarm-serve org/model --root {ROOT} --blocks 8:12 --network test --initial-peers /ip4/1.2.3.4/tcp/1/p2p/Q"
    )


def test_no_servers_address_is_shown():
    text = detail([record(1, 0, 12, addresses=("198.51.100.7:4000",))]).model_dump_json()
    assert "198.51.100.7" not in text
    assert "4000" not in text


def test_ranges_are_written_as_people_write_them():
    assert ranges([1, 2, 3, 7]) == "blocks 1:4, 7:8"


def test_the_example_is_what_the_api_gives():
    assert EXAMPLE.read_text() == example_json(), "run python -m tests.monitor.make_example"
    State.model_validate_json(json.dumps(json.loads(EXAMPLE.read_text())["/api/v1/state"]))
