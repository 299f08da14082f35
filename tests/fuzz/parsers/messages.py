"""The parsers of messages and of their tensors."""

import json
from base64 import b64encode

import torch
from pydantic import TypeAdapter

from swarm.activations import Activations
from swarm.errors import InvalidMessage
from swarm.net.greeting import HELLO_DOMAIN
from swarm.protocol import codec, meeting
from swarm.protocol import messages as wire
from swarm.protocol.attest import Attest, Attested
from swarm.protocol.base import Message
from swarm.protocol.marks import Marks
from swarm.protocol.tensors import TensorMeta, decode_tensors
from tests.dht.support import ROOT, signed
from tests.fuzz.parsers.base import ALICE, BOB, HASH, NOW, Opened, Parser

SESSION = "0123456789abcdef" * 2


def activations_of(message: Message) -> Activations | None:
    """Activations as the message describes them, of bytes that count up."""

    def counted(name: str) -> torch.Tensor | None:
        meta = getattr(message, name, None)
        if meta is None:
            return None
        return torch.arange(meta.n_bytes).to(torch.uint8).view(getattr(torch, meta.dtype)).view(meta.shape)

    hidden = counted("hidden")
    return None if hidden is None else Activations(hidden, counted("positions"), counted("mask"))


def frame_of(message: Message) -> bytes:
    return b"".join(codec.encode(message, activations_of(message)))


def messages() -> tuple[Message, ...]:
    hidden, positions = TensorMeta(dtype="bfloat16", shape=(2, 3, 8)), TensorMeta(dtype="int64", shape=(1, 3))
    mask = TensorMeta(dtype="uint8", shape=(2, 3))
    of = {"session": SESSION, "epoch": 3}
    columns = {"sessions": (SESSION, "0" * 32), "epochs": (3, 4), "steps": (1, 9)}
    hidden_of_two = TensorMeta(dtype="bfloat16", shape=(2, 1, 8))
    past = {"hidden": hidden, "positions": positions, "mask": mask}
    coded = {**past, "hidden": TensorMeta(dtype="bfloat16", shape=(2, 3, 40), coding="int8")}
    record = b64encode(signed(BOB, now=NOW)).decode()
    return (
        hello(),
        wire.Ping(nonce=7),
        wire.Pong(nonce=7),
        wire.Open(
            **of, root=ROOT, numeric_class="float32", start=0, stop=4, positions_max=64, rollback_max=4,
            batch=2, positions_soon=60, previous=BOB.peer_id, next_record=record,
            marks=Marks(size=64, tags=("a" * 32, "0" * 32)), receipt=True,
        ),
        wire.Opened(**of, window=8, held=128),
        wire.Reroute(**of, previous=BOB.peer_id, next_record=record, after_step=4),
        wire.Rerouted(**of, journal=True),
        wire.Replay(**of, step=4, hops=2),
        wire.Rebuild(**of, start=0, total=3, hops=1, **past),
        wire.Rebuild(**of, start=0, total=3, hops=1, **coded),
        wire.Rebuilt(**of, stop=3),
        wire.Inquiry(**of),
        wire.Progress(**of, applied=3, length=4, under_way=1, jobs_done=5, quiet_ms=6),
        wire.Leaving(**of),
        wire.Step(**of, step=1, keep=0, rows=(1, 0), budget_ms=100, want=1, **past),
        wire.Step(**of, step=1, keep=0, budget_ms=100, want=1, **coded),
        wire.Output(**of, step=1, hidden=hidden),
        wire.Steps(**columns, keeps=(0, 4), budgets_ms=(100, 90), wants=(1, 0), hidden=hidden_of_two),
        wire.Outputs(**columns, hidden=hidden_of_two),
        wire.Refused(**of, step=4, code="no_room", why="full", retry_after_ms=250),
        wire.Close(session=SESSION),
        Attest(**of),
        Attested(**of, statement="{}", signature="0" * 128),
        meeting.Moor(record=signed(BOB, now=NOW).hex()),
        meeting.Moored(seen="1.2.3.4:5678"),
        meeting.Call(call=SESSION, callee=BOB.peer_id, port=31330, back=ROOT),
        meeting.Called(call=SESSION, token=ROOT, caller=BOB.peer_id, reach="1.2.3.4:31330", back=ROOT),
        meeting.Calling(call=SESSION, token=ROOT),
        meeting.Uncalled(call=SESSION, cause="busy", why="too many", retry_after_ms=250),
        meeting.Meet(token=ROOT, peer="1.2.3.4:5678", local="192.168.0.2:4000", rtt_ms=70),
        meeting.Claim(channel=ROOT, proof=ROOT),
        meeting.Claimed(proof=ROOT),
        meeting.AnchorInquiry(),
        meeting.AnchorLoad(
            moored=3, moored_max=1024, meetings=1, meetings_max=512, pairs=2, pairs_max=128,
            relayed_bytes_per_s=120_000, relayed_bytes_per_s_max=16 << 20, refused=5,
        ),
    )  # fmt: skip


def hello() -> wire.Hello:
    signature = ALICE.sign(HELLO_DOMAIN[True], HASH).hex()
    return wire.Hello(public_key=ALICE.public_key.hex(), signature=signature, software="0.1.0")


def _read_frame(data: bytes) -> object:
    return codec.decode(memoryview(bytearray(data)))


def opened_frame(frame: bytes) -> Opened:
    start = 2 + int.from_bytes(frame[:2], "big")
    header, payload = frame[2:start], frame[start:]
    return json.loads(header), lambda text: (len(text) % (1 << 16)).to_bytes(2, "big") + text + payload


_METAS = TypeAdapter(tuple[TensorMeta | None, ...])


def _read_tensors(data: bytes) -> object:
    """Metas as a line of JSON, if pydantic lets them through; then the payload."""
    line, _, payload = data.partition(b"\n")
    try:
        metas = _METAS.validate_json(line)
    except ValueError:
        return None
    return decode_tensors(metas[:4], memoryview(bytearray(payload or b"\0")))


def _tensor_seeds() -> tuple[bytes, ...]:
    seeds = []
    for shape in ((4,), (2, 3, 8), (1 << 26, 1 << 26, 1 << 26)):
        for dtype in ("float32", "int64", "uint8"):
            meta = TensorMeta(dtype=dtype, shape=shape)
            seeds.append(_METAS.dump_json((meta, None, meta)) + b"\n" + bytes(min(2 * meta.n_bytes, 1000)))
    for shape in ((32,), (2, 3, 40), (1, 1, 1 << 26)):
        meta = TensorMeta(dtype="bfloat16", shape=shape, coding="int8")
        seeds.append(_METAS.dump_json((meta,)) + b"\n" + bytes(min(meta.sent_bytes, 1000)))
    return tuple(seeds)


def _opened_line(data: bytes) -> Opened:
    line, _, payload = data.partition(b"\n")
    return json.loads(line), lambda text: text + b"\n" + payload


def _all() -> tuple[Parser, ...]:
    frames = tuple(frame_of(message) for message in messages())
    return (
        Parser("frame", _read_frame, (InvalidMessage,), frames, opened_frame),
        Parser("tensors", _read_tensors, (InvalidMessage,), _tensor_seeds(), _opened_line),
    )


PARSERS = _all()
