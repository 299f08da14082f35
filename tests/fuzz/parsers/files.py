"""The parsers of files and options: keys, lists of peers, manifests, configs."""

import atexit
import hashlib
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save

from swarm.access import Access, NetworkKey
from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.auditing.evidence import BadEvidence, Evidence
from swarm.dht.records import canonical_json
from swarm.errors import BadBlocks, BadConfiguration, UnsupportedArchitecture, UnsupportedCheckpoint
from swarm.model.checkpoint import _read_config
from swarm.model.manifest import MANIFEST_NAME, Manifest, WeightIndex
from swarm.model.reading import MalformedWeights, read_tensors
from swarm.protocol.receipts import Receipt, Statement, Tally
from tests.fuzz.parsers.base import ALICE, BOB, Opened, Parser

FOLDER = Path(__file__).parents[3]


def _as_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def written(data: bytes) -> object:
        path = _folder() / name
        path.touch(0o600)
        path.write_bytes(data)
        return read(path)

    return written


@cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _read_model_config(data: bytes) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers': about oddities of a config
        return _read_config("a model", data)


def _read_weights(data: bytes) -> object:
    path = _folder() / "model.safetensors"
    path.write_bytes(data)
    return read_tensors(path, hashlib.sha256(data).hexdigest(), lambda _: True)


def _weights() -> bytes:
    return save({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bool)})


def _opened_json(data: bytes) -> Opened:
    return json.loads(data), lambda text: text


def _demo(name: str) -> bytes:
    return (FOLDER / "swarm" / "demo" / "checkpoint" / name).read_bytes()


def _manifest() -> bytes:
    return canonical_json({"files": {"config.json": "0" * 64, "model.safetensors": "1" * 64}})


def _index() -> bytes:
    return canonical_json({"metadata": {"total_size": 1}, "weight_map": {"a.weight": "model-1.safetensors"}})


def _evidence() -> bytes:
    hidden = torch.arange(2 * 3 * 4.0).view(2, 3, 4)
    inputs = Activations(hidden, torch.arange(3)[None] + 1, torch.ones(2, 3, dtype=torch.uint8))
    tally = Tally()
    tally.add(0, inputs, hidden[:, 1:])
    digest = "0" * 64
    statement = Statement(
        peer=ALICE.public_key.hex(), session="0" * 32, root=digest, numeric_class="float32", start=0, stop=4, rows=2,
        length=3, told=2, inputs=tally.inputs, outputs=tally.outputs, issued=1,
    )  # fmt: skip
    return Evidence.of(Receipt.sign(statement, ALICE), inputs, hidden[:, 1:]).to_bytes()


def _opened_evidence(data: bytes) -> Opened:
    """The header; a statement in it that was changed is signed anew, where it can be."""
    start = data.index(b"\n") + 5
    stop = start + int.from_bytes(data[start - 4 : start], "big")
    value = json.loads(data[start:stop])
    try:
        value["statement"] = json.loads(value["statement"])
    except (LookupError, TypeError) as error:
        raise ValueError("no evidence any more") from error

    def close(text: bytes) -> bytes:
        try:
            changed = json.loads(text)
            changed["statement"] = json.dumps(changed["statement"])
            changed["signature"] = ALICE.sign(b"swarm receipt", changed["statement"].encode()).hex()
            text = json.dumps(changed).encode()
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        return data[: start - 4] + len(text).to_bytes(4, "big") + text + data[stop:]

    return value, close


def _all() -> tuple[Parser, ...]:
    peers = f"# members\n{ALICE.peer_id} # Alice\n\n{BOB.peer_id}\n".encode()
    checkpoint = (UnsupportedCheckpoint, UnsupportedArchitecture)
    return (
        Parser("evidence", Evidence.read, (BadEvidence,), (_evidence(),), _opened_evidence),
        Parser("network-key", _as_file("key", NetworkKey.load), (BadConfiguration,), (b"0f" * 32 + b"\n",)),
        Parser("allow-peers", _as_file("peers", lambda path: Access.load(None, path)), (BadConfiguration,), (peers,)),
        Parser(
            "blocks", lambda data: Blocks.parse(data.decode(errors="replace"), 12), (BadBlocks,), (b"2:4", b" 0:12")
        ),
        Parser("index", lambda data: WeightIndex.parse("m", data), (UnsupportedCheckpoint,), (_index(),), _opened_json),
        Parser(
            "manifest",
            _as_file(MANIFEST_NAME, lambda path: Manifest.load(path.parent)),
            (UnsupportedCheckpoint,),
            (_manifest(),),
            _opened_json,
        ),
        Parser("config", _read_model_config, checkpoint, (_demo("config.json"),), _opened_json),
        Parser("weights", _read_weights, (MalformedWeights,), (_weights(),)),
    )


PARSERS = _all()
