"""Every parser, fed for a moment as `make fuzz` does for hours; and what longer runs have found."""

import json
import os
import zlib
from typing import get_args

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from swarm.blocks import BLOCKS_MAX
from swarm.dht.format import unpack_dictionary
from swarm.dht.records import check_address
from swarm.errors import InvalidMessage, UnsupportedArchitecture, UnsupportedCheckpoint
from swarm.identity import peer_id_of, public_key_of
from swarm.model.checkpoint import _read_config
from swarm.model.traits import traits_of
from swarm.protocol import attest, codec, meeting
from swarm.protocol import messages as wire
from swarm.protocol.base import Message
from swarm.protocol.marks import Marks
from swarm.protocol.tensors import encode_tensor
from tests.dht.support import soon
from tests.fuzz.parsers import PARSERS
from tests.fuzz.parsers.base import Parser
from tests.fuzz.parsers.messages import activations_of, frame_of
from tests.fuzz.run import MEASURED_OF, MEMORY_MAX, feed, feed_atheris, feed_hypothesis, has_atheris

CASES = 80
EXECUTIONS = 2000
CPU_S = 2.0  # per parser, if the executions take longer
BROKEN = """
import swarm.blocks

def parse(text, n_blocks=None):
    raise OverflowError

swarm.blocks.Blocks.parse = parse
"""


def guided(test):
    """Mark a test of atheris: an interpreter of its own imports everything anew, instrumented."""
    reason = "atheris is not installed: it has wheels for Linux on x86-64 alone"
    return pytest.mark.long(pytest.mark.skipif(not has_atheris(), reason=reason)(test))


@pytest.fixture(autouse=True)
def quiet():
    """The parsers log thousands of inputs, which helps no reader."""
    configured = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.configure(**configured)


@pytest.mark.parametrize("parser", PARSERS.values(), ids=lambda parser: parser.name)
def test_generated_input_raises_nothing_but_what_is_documented(parser):
    assert feed_hypothesis(parser, CASES) >= CASES


@guided
def test_input_guided_by_coverage_raises_nothing_but_what_is_documented(tmp_path):
    done = list(feed_atheris([*PARSERS.values()], tmp_path, EXECUTIONS, CPU_S))
    assert {one.parser: one.finding for one in done if one.finding is not None} == {}
    assert [one.parser for one in done] == [*PARSERS]
    assert all(one.executions > 0 for one in done)


@guided
def test_a_run_goes_on_where_one_was_interrupted_and_begins_anew_when_it_was_over(tmp_path):
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks" / "interrupted.json").write_text(json.dumps({"executions": 10_000, "cpu_s": 1000.0}))
    parsers = [PARSERS["blocks"]]
    (resumed,) = feed_atheris(parsers, tmp_path, 10_000 + EXECUTIONS, 2000.0)
    assert (resumed.executions, resumed.finding) == (10_000 + EXECUTIONS, None)
    assert 1000 <= resumed.cpu_s < 2000
    (again,) = feed_atheris(parsers, tmp_path, EXECUTIONS, 2000.0)
    assert again.executions == EXECUTIONS
    assert again.cpu_s < 1000


@pytest.mark.parametrize("parser", PARSERS.values(), ids=lambda parser: parser.name)
def test_the_seeds_are_what_a_parser_takes(parser):
    """At least the first: else mutations of it would never get far."""
    parser.read(parser.seeds[0])


def test_an_undocumented_error_is_a_finding():
    def read(data):
        if data[:1] == b"\x7f":
            raise OverflowError

    with pytest.raises(OverflowError):
        feed_hypothesis(Parser("broken", read, (ValueError,), (b"\x7e",)), 3000)


def test_much_memory_for_little_input_is_a_finding():
    with pytest.raises(AssertionError, match="bytes of memory"):
        feed_hypothesis(Parser("greedy", lambda data: bytearray(2 * MEMORY_MAX), (), (b"x",)), 300)


@guided
def test_the_findings_of_atheris_are_seen(tmp_path, monkeypatch):
    """Its own log is what is shown: here of a parser that it does not have."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    (done,) = feed_atheris([PARSERS["blocks"]], tmp_path / "fuzz", EXECUTIONS, CPU_S)
    assert done.finding is not None
    assert "OverflowError" in done.finding


_metas = st.builds(
    lambda dtype, shape: wire.TensorMeta(dtype=dtype, shape=shape),
    st.sampled_from(["float32", "float16", "bfloat16", "int64", "uint8"]),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
)
_hex = st.text("0123456789abcdef", min_size=64, max_size=64)
_texts = st.text(st.characters(codec="utf-8"), max_size=64)
_hosts = st.text("0123456789.:[]", max_size=64)
_peers = st.binary(min_size=32, max_size=32).map(peer_id_of)
_positions = st.integers(1, wire.POSITIONS_MAX)
_blocks = st.integers(1, BLOCKS_MAX)
_steps = st.integers(0, wire.STEPS_MAX)
_large = st.integers(0, (1 << 53) - 1)
FIELDS = {
    "marks": st.none()
    | st.builds(
        Marks,
        size=st.integers(16, 4096),
        tags=st.lists(st.from_regex(r"\A[0-9a-f]{32}\Z"), min_size=1, max_size=20).map(tuple),
    ),
    "held": st.none() | st.integers(1, wire.POSITIONS_MAX),
    "tenant": _hex.map(lambda text: text[:32]),
    "session": _hex.map(lambda text: text[:32]), "epoch": st.integers(0, 1 << 31), "step": _steps, "after_step": _steps,
    "applied": _steps, "root": _hex, "public_key": _hex, "signature": _hex.map(lambda text: 2 * text),
    "software": _texts, "numeric_class": _texts, "why": _texts, "nonce": _large, "jobs_done": _large,
    "quiet_ms": _large,
    "start": _blocks, "stop": _blocks, "hops": _blocks, "positions_max": _positions, "total": _positions,
    "length": _positions, "keep": _positions, "want": _positions,
    "batch": st.integers(1, wire.ROWS_MAX), "positions_soon": _positions,
    "rollback_max": st.integers(0, wire.ROLLBACK_MAX), "previous": st.none() | _peers, "relay": st.booleans(),
    "next_record": st.none() | st.text("+/=aZ09", max_size=4096),
    "rebuild": st.booleans(), "reset": st.booleans(), "journal": st.booleans(), "window": st.integers(1, 64),
    "under_way": st.integers(0, 1 << 20), "budget_ms": st.integers(0, 24 * 3600 * 1000), "hidden": _metas,
    "rows": st.none() | st.lists(st.integers(0, wire.ROWS_MAX - 1), max_size=wire.ROWS_MAX).map(tuple),
    "code": st.sampled_from(get_args(wire.RefusalCode)), "blame": st.sampled_from(get_args(wire.Blame)),
    "retry_after_ms": st.none() | st.integers(0, 24 * 3600 * 1000),
    "lifetime_s": st.integers(1, wire.LIFETIME_S_MAX), "tokens_max": st.none() | st.integers(0, 1 << 48),
    "bundles": st.booleans(), "loads": st.booleans(), "moves": st.booleans(), "skips": st.booleans(),
    "receipts": st.booleans(), "receipt": st.none() | st.booleans(),
    "statement": st.none() | _texts,
    "record": st.binary(max_size=2048).map(bytes.hex), "channel": _hex, "proof": _hex,
    "call": _hex.map(lambda text: text[:32]), "token": _hex, "back": _hex, "callee": _peers, "caller": _peers,
    "port": st.integers(0, 65535), "seen": _hosts, "reach": _hosts, "peer": _hosts, "local": _hosts,
    "rtt_ms": st.integers(0, 60_000), "cause": st.sampled_from(get_args(meeting.UncalledCause)),
    **dict.fromkeys(meeting.AnchorLoad.model_fields, st.integers(0, 1 << 20)),
}  # fmt: skip
COLUMNS = {"sessions": "session", "epochs": "epoch", "steps": "step", "keeps": "keep", "budgets_ms": "budget_ms",
           "wants": "want"}  # fmt: skip


def bundles_of(kind):
    """Columns of one length, with a tensor that has a row for each."""
    names = [name for name in COLUMNS if name in kind.model_fields]
    rows = st.lists(st.tuples(*(FIELDS[COLUMNS[name]] for name in names)), min_size=1, max_size=wire.BUNDLE_MAX)

    def made(rows):
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        return kind(**columns, hidden=wire.TensorMeta(dtype="bfloat16", shape=(len(rows), 1, 8)))

    return rows.map(made)


def messages_of(kind):
    if "sessions" in kind.model_fields:
        return bundles_of(kind)
    fields = {name: FIELDS[name] for name in kind.model_fields if name not in {"kind", "positions", "mask"}}
    beside = {name: st.none() | _metas for name in ("positions", "mask") if name in kind.model_fields}
    return st.builds(kind, **fields, **beside)


MODULES = {module.__name__ for module in (wire, meeting, attest)}
KINDS = [kind for kind in Message.__subclasses__() if kind.__module__ in MODULES]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(st.data())
def test_a_message_comes_out_as_it_went_in(kind, data):
    message = data.draw(messages_of(kind))
    described = activations_of(message)
    sent = _tensors(described)
    decoded, got = codec.decode(memoryview(bytearray(frame_of(message))))
    assert decoded == message
    received = _tensors(got)
    assert [tensor.dtype for tensor in received] == [tensor.dtype for tensor in sent]
    assert [tensor.shape for tensor in received] == [tensor.shape for tensor in sent]
    assert [encode_tensor(tensor).tobytes() for tensor in received] == [encode_tensor(one).tobytes() for one in sent]


def _tensors(activations):
    all_of_it = () if activations is None else (activations.hidden, activations.positions, activations.mask)
    return [tensor for tensor in all_of_it if tensor is not None]


# --- what was found --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zone", ["eth0", "x" * 80, "a..\u00fc"])
def test_an_address_names_no_interface(zone):
    """The resolver raises UnicodeError for long or odd ones, in whoever dials what a record says."""
    with pytest.raises(ValueError, match="interface"):
        check_address(f"[fe80::1%{zone}]:80")


def test_nested_claims_of_many_items_make_no_room_for_them():
    value = b"\xdd\0\1\0\0" * 500 + bytes(1 << 16)
    feed(Parser("dictionary", unpack_dictionary, (), ()), measured(value))
    assert unpack_dictionary(value) == []


def measured(data):
    """The same bytes with others behind them, so that their memory is looked at."""
    return next(longer for n in range(256) if not zlib.crc32(longer := data + bytes(n)) % MEASURED_OF)


def test_a_long_line_is_no_peer_id_at_once():
    with soon(1), pytest.raises(ValueError, match="too long"):
        public_key_of("2" * (1 << 18))


@pytest.mark.parametrize("field", ["rows", "shape"])
def test_thousands_of_wrong_numbers_cost_no_more_than_one(field):
    numbers = "[" + ",".join(["-1"] * 10_000) + "]"
    header = {"rows": f'"rows":{numbers}', "shape": f'"hidden":{{"dtype":"uint8","shape":{numbers}}}'}[field]
    text = f'{{"kind":"step",{header}}}'.encode()
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(wire.AnyMessage).validate_json(text)
    assert caught.value.error_count() < 20
    with pytest.raises(InvalidMessage):
        codec.decode(memoryview(bytearray(len(text).to_bytes(2, "big") + text)))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[" * 100_000, UnsupportedCheckpoint),
        ('{"model_type":"llama","dtype":[]}', UnsupportedArchitecture),
        ('{"model_type":"llama","attention_bias":null}', UnsupportedArchitecture),
    ],
)
def test_a_config_that_breaks_its_family_is_refused(text, error):
    with pytest.raises(error):
        _read_config("a model", text.encode())


@pytest.mark.parametrize("n_blocks", [0, 5000])
def test_a_config_with_an_impossible_number_of_blocks_is_refused_before_one_is_made(n_blocks):
    fields = json.loads(PARSERS["config"].seeds[0]) | {"num_hidden_layers": n_blocks, "layer_types": None}
    with soon(10), pytest.raises(UnsupportedArchitecture):
        traits_of(_read_config("a model", json.dumps(fields).encode()))
