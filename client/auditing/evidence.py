"""Evidence against a server in one file: its receipt, the activations that it was given, and those that it returned.

    "swarm evidence 1\\n"    length of the header, 4 bytes    header: JSON    hidden, outputs, positions, mask

The receipt binds inputs and outputs by their digests, and the server has signed it. So nothing of the file can be
changed without its key. Whether the outputs follow from the inputs needs the checkpoint that the receipt names
(`swarm.client.auditing.verify`). The file itself claims nothing, and its sender need not be trusted.

A file is a stranger's. `Evidence.read` returns only what its receipt is of.
"""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from swarm.activations import Activations, is_finite
from swarm.errors import InvalidMessage, SwarmError
from swarm.limits import limit
from swarm.protocol.attest import Signature, StatementText
from swarm.protocol.receipts import Receipt, ReceiptLimits, Tally
from swarm.protocol.tensors import TensorMeta, decode_tensors, encode_tensor, meta_of

_log = structlog.get_logger("swarm.audits")


class BadEvidence(SwarmError):
    """A file that is no evidence: damaged, changed, put together from several, or of something that nobody signed."""

    def __init__(self, why: str) -> None:
        super().__init__(f"this is no evidence: {why}")
        self.why = why


@dataclass(frozen=True, slots=True)
class EvidenceFileLimits:
    """Bounds on files of evidence."""

    file_bytes_max: int = limit(256 << 20, "bytes", "of one file; a larger one is not read")
    header_bytes_max: int = limit(8 << 10, "bytes", "of its header")
    files_max: int = limit(256, "files", "in a folder; no more are written")


@dataclass(frozen=True, slots=True)
class _Form:
    magic: bytes = b"swarm evidence 1\n"
    length_bytes: int = 4
    alignment: int = 16


class _Header(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    statement: StatementText
    signature: Signature
    hidden: TensorMeta
    outputs: TensorMeta
    positions: TensorMeta | None = None
    mask: TensorMeta | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """A receipt with what it is of.

    inputs: all positions as the server decoded them. outputs: of the last `receipt.statement.told` positions, as their
    receiver did, [rows, told, hidden_size].
    """

    receipt: Receipt
    inputs: Activations
    outputs: Tensor

    @classmethod
    def of(cls, receipt: Receipt, inputs: Activations, outputs: Tensor) -> "Evidence":
        """Put evidence together. Raises BadEvidence where the receipt is of something else."""
        said, limits = receipt.statement, ReceiptLimits()
        if (said.rows, said.length) != (inputs.rows, inputs.tokens):
            raise BadEvidence(f"inputs of {inputs.rows} x {inputs.tokens}, the receipt of {said.rows} x {said.length}")
        if outputs.shape != (said.rows, said.told, inputs.hidden.shape[2]):
            raise BadEvidence(f"outputs of shape {list(outputs.shape)}, the receipt says {said.told} were sent on")
        if not said.told or said.length > limits.positions_max:
            raise BadEvidence(f"{said.told} outputs of {said.length} positions, at most {limits.positions_max}")
        if not is_finite(inputs.hidden):
            raise BadEvidence("its inputs are infinite or no numbers")
        tally = Tally(limits=limits)
        tally.add(0, inputs, outputs)
        if tally.inputs != said.inputs:
            raise BadEvidence("its inputs are not those that the server signed")
        if tally.outputs != said.outputs:
            raise BadEvidence("its outputs are not those that the server signed")
        return cls(receipt, inputs, outputs)

    @classmethod
    def read(cls, data: bytes) -> "Evidence":
        """Read a file. Raises BadEvidence, with the reason."""
        form, limits = _Form(), EvidenceFileLimits()
        start = len(form.magic) + form.length_bytes
        if not data.startswith(form.magic) or len(data) < start:
            raise BadEvidence("it does not begin as one")
        length = int.from_bytes(data[len(form.magic) : start], "big")
        if length > min(limits.header_bytes_max, len(data) - start):
            raise BadEvidence("its header's length is out of range")
        try:
            header = _Header.model_validate_json(data[start : start + length])
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            raise BadEvidence(f"header: {'.'.join(map(str, first['loc']))}: {first['msg']}"[:300]) from None
        receipt = _receipt(header)
        inputs, outputs = _tensors(header, memoryview(bytearray(data[start + length :])))
        return cls.of(receipt, inputs, outputs)

    @classmethod
    def load(cls, path: Path) -> "Evidence":
        """Read a file from disk. Raises BadEvidence."""
        most = EvidenceFileLimits().file_bytes_max
        try:
            if path.stat().st_size > most:
                raise BadEvidence(f"it has more than {most >> 20} MiB")
            return cls.read(path.read_bytes())
        except OSError as error:
            raise BadEvidence(f"{path}: {error.strerror or error}") from None

    def to_bytes(self) -> bytes:
        """Return the file's bytes."""
        form = _Form()
        positions, mask = self.inputs.positions, self.inputs.mask
        beside = [each for each in (positions, mask) if each is not None]
        header = _Header(
            statement=self.receipt.text,
            signature=self.receipt.signature,
            hidden=meta_of(self.inputs.hidden),
            outputs=meta_of(self.outputs),
            positions=None if positions is None else meta_of(positions),
            mask=None if mask is None else meta_of(mask),
        )
        text = header.model_dump_json(exclude_none=True).encode()
        text += b" " * (-(len(form.magic) + form.length_bytes + len(text)) % form.alignment)
        tensors = (bytes(encode_tensor(each)) for each in (self.inputs.hidden, self.outputs, *beside))
        return form.magic + len(text).to_bytes(form.length_bytes, "big") + text + b"".join(tensors)


@dataclass(frozen=True, slots=True)
class Folder:
    """Where evidence is kept."""

    path: Path
    limits: EvidenceFileLimits = EvidenceFileLimits()

    def keep(self, evidence: Evidence) -> Path | None:
        """Write a file. Returns where it is; None where the folder is full, or cannot be written."""
        said = evidence.receipt.statement
        name = f"{said.peer_id}-{said.session[:8]}.evidence"
        partial = self.path / f".{name}.{secrets.token_hex(4)}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if sum(each.suffix == ".evidence" for each in self.path.iterdir()) >= self.limits.files_max:
                _log.warning("no evidence kept: the folder is full", folder=str(self.path))
                return None
            partial.write_bytes(evidence.to_bytes())
            os.replace(partial, self.path / name)
        except OSError as error:
            _log.warning("no evidence kept", folder=str(self.path), why=error.strerror)
            return None
        _log.warning("evidence kept", peer=said.peer_id, file=str(self.path / name))
        return self.path / name


def _receipt(header: _Header) -> Receipt:
    try:
        return Receipt.read(header.statement, header.signature)
    except ValueError as error:
        raise BadEvidence(str(error)) from None


def _tensors(header: _Header, payload: memoryview) -> tuple[Activations, Tensor]:
    """Read inputs and outputs. Raises BadEvidence for shapes and types that no session has."""
    hidden, positions, mask = header.hidden, header.positions, header.mask
    floats = {"float32", "float16", "bfloat16"}
    plain = [meta for meta in (hidden, header.outputs, positions, mask) if meta is not None]
    if any(meta.coding is not None for meta in plain):
        raise BadEvidence("its tensors are coded")
    if len(hidden.shape) != 3 or len(header.outputs.shape) != 3 or {hidden.dtype, header.outputs.dtype} - floats:
        raise BadEvidence("its hidden states have another form")
    rows, tokens, _ = hidden.shape
    if positions is not None and (positions.dtype != "int64" or positions.shape not in {(1, tokens), (rows, tokens)}):
        raise BadEvidence("its position ids have another form")
    if mask is not None and (mask.dtype != "uint8" or mask.shape != (rows, tokens)):
        raise BadEvidence("its mask has another form")
    try:
        found: Sequence[Tensor | None] = decode_tensors((hidden, header.outputs, positions, mask), payload)
    except InvalidMessage as error:
        raise BadEvidence(str(error)) from None
    given, outputs, ids, real = (None if each is None else each.clone() for each in found)
    assert given is not None
    assert outputs is not None
    return Activations(given, ids, real), outputs
