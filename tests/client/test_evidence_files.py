"""Files of evidence: only what a server signed is read, and only what is wrong convicts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.auditing.cli import NothingShown, command
from swarm.client.auditing.evidence import BadEvidence, Evidence, EvidenceFileLimits, Folder
from swarm.client.auditing.verify import VerifyLimits, verify
from swarm.errors import RootMismatch
from swarm.identity import Identity
from swarm.model.checkpoint import open_checkpoint
from swarm.model.loading import load_span
from swarm.protocol.receipts import Receipt, Statement, Tally
from tests.support.quantised import write
from tests.support.swarms import make_checkpoint

SERVER, ATTACKER = Identity(b"s" * 32), Identity(b"x" * 32)
BLOCKS = Blocks(2, 4)
TOKENS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return open_checkpoint(make_checkpoint("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def span(checkpoint):
    return load_span(checkpoint, BLOCKS, dtype=torch.float32)


def inputs_of(seed=1, size=1.0, **beside):
    hidden = torch.randn(1, TOKENS, 64, generator=torch.Generator().manual_seed(seed)) * size
    return Activations(hidden, **beside)


def computed(span, inputs):
    with torch.inference_mode():
        return span.forward(inputs.hidden, cache=None, positions=inputs.positions).clone()


def evidence_of(checkpoint, inputs, outputs, signer=SERVER, **changes):
    """What a server signs that has returned these outputs."""
    tally = Tally()
    tally.add(0, inputs, outputs)
    fields = {
        "peer": signer.public_key.hex(), "session": "ab" * 16, "root": checkpoint.root, "numeric_class": "float32",
        "start": BLOCKS.start, "stop": BLOCKS.stop, "rows": tally.rows, "length": tally.length, "told": tally.told,
        "inputs": tally.inputs, "outputs": tally.outputs, "issued": 1_800_000_000,
    }  # fmt: skip
    return Evidence.of(Receipt.sign(Statement(**fields | changes), signer), inputs, outputs)


@pytest.fixture(scope="module")
def honest(checkpoint, span):
    return evidence_of(checkpoint, inputs_of(), computed(span, inputs_of()))


@pytest.fixture(scope="module")
def wrong(checkpoint, span):
    return evidence_of(checkpoint, inputs_of(), computed(span, inputs_of()) + 0.1)


def test_a_file_is_read_as_it_was_written(wrong):
    again = Evidence.read(wrong.to_bytes())
    assert again.receipt == wrong.receipt
    assert torch.equal(again.inputs.hidden, wrong.inputs.hidden)
    assert torch.equal(again.outputs, wrong.outputs)
    assert again.to_bytes() == wrong.to_bytes()


def test_every_byte_of_a_file_counts(wrong):
    """Each byte of the header, and some of the tensors: with another value it is no evidence, or the same."""
    data = wrong.to_bytes()
    for at in [*range(400), *range(400, len(data), 97)]:
        changed = bytearray(data)
        changed[at] ^= 1
        try:
            read = Evidence.read(bytes(changed))
        except BadEvidence:
            continue
        assert read.to_bytes() == data, f"byte {at} is not bound by the signature"


@pytest.mark.parametrize("cut", [0, 5, 20, 300, -1])
def test_a_file_that_is_cut_is_refused(wrong, cut):
    with pytest.raises(BadEvidence):
        Evidence.read(wrong.to_bytes()[:cut])


def test_a_client_that_changes_its_data_frames_nobody(checkpoint, honest):
    """Inputs and outputs that are not the server's own are refused, each with its reason."""
    receipt, inputs, outputs = honest.receipt, honest.inputs, honest.outputs
    for lie, why in (
        ((receipt, inputs, outputs + 0.1), "outputs are not those"),
        ((receipt, inputs_of(2), outputs), "inputs are not those"),
        ((receipt, replace(inputs, positions=torch.arange(1, TOKENS + 1)[None]), outputs), "inputs are not those"),
        ((receipt, replace(inputs, mask=torch.zeros(1, TOKENS, dtype=torch.uint8)), outputs), "inputs are not those"),
        ((receipt, inputs, outputs[:, 1:]), "outputs of shape"),
        ((receipt, inputs.part(1, TOKENS), outputs[:, 1:]), "the receipt of"),
        ((receipt, inputs, outputs.flip(1)), "outputs are not those"),
        ((receipt, inputs, outputs.to(torch.bfloat16)), "outputs are not those"),
    ):
        with pytest.raises(BadEvidence, match=why):
            Evidence.of(*lie)


def test_parts_of_several_files_are_no_evidence(checkpoint, span, honest):
    other = evidence_of(checkpoint, inputs_of(2), computed(span, inputs_of(2)), session="cd" * 16)
    for receipt, inputs, outputs in (
        (honest.receipt, honest.inputs, other.outputs),
        (honest.receipt, other.inputs, honest.outputs),
        (other.receipt, honest.inputs, honest.outputs),
    ):
        with pytest.raises(BadEvidence, match="not those"):
            Evidence.of(receipt, inputs, outputs)


def test_a_receipt_in_anothers_name_is_refused(checkpoint, wrong):
    """An attacker signs for itself alone: neither its key under the server's name nor a signature of its own counts."""
    forged = evidence_of(checkpoint, wrong.inputs, wrong.outputs, ATTACKER, peer=SERVER.public_key.hex())
    with pytest.raises(BadEvidence, match="signature"):
        Evidence.read(forged.to_bytes())
    own = evidence_of(checkpoint, wrong.inputs, wrong.outputs, ATTACKER)
    assert Evidence.read(own.to_bytes()).receipt.statement.peer_id == ATTACKER.peer_id
    swapped = replace(wrong.receipt, signature=own.receipt.signature)
    with pytest.raises(BadEvidence, match="signature"):
        Evidence.read(replace(wrong, receipt=swapped).to_bytes())


def test_a_wrong_server_is_shown_and_a_right_one_is_not(checkpoint, wrong, honest):
    assert verify(wrong, checkpoint).is_wrong
    finding = verify(honest, checkpoint)
    assert (finding.is_wrong, finding.is_steady) == (False, True)


def test_a_server_with_the_checkpoints_own_codes_is_shown_as_well(tmp_path):
    checkpoint = open_checkpoint(write(tmp_path, "gptq"))
    span = load_span(checkpoint, BLOCKS, dtype=torch.float32, quantize="own4")
    outputs = computed(span, inputs_of())
    assert not verify(evidence_of(checkpoint, inputs_of(), outputs, numeric_class="float32+own4"), checkpoint).is_wrong
    assert verify(evidence_of(checkpoint, inputs_of(), -outputs, numeric_class="float32+own4"), checkpoint).is_wrong


def test_the_settings_model_is_not_the_evidences(tmp_path, wrong):
    path = tmp_path / "evidence"
    path.write_bytes(wrong.to_bytes())
    settings = {"default_map": {"model": "/nonexistent"}, "auto_envvar_prefix": "SWARM"}
    result = CliRunner().invoke(command, [str(path)], env={"SWARM_MODEL": "/nonexistent"}, **settings)
    assert result.exit_code == 0, result.output
    assert "signed by this server" in result.output


@pytest.mark.long
def test_only_the_outputs_that_were_sent_on_are_compared(checkpoint, span):
    inputs, outputs = inputs_of(), computed(span, inputs_of())[:, -1:]
    assert not verify(evidence_of(checkpoint, inputs, outputs), checkpoint).is_wrong
    assert verify(evidence_of(checkpoint, inputs, -outputs), checkpoint).is_wrong


@pytest.mark.long
def test_position_ids_are_computed_with(checkpoint, span):
    inputs = inputs_of(positions=torch.arange(5, 5 + TOKENS)[None])
    assert not verify(evidence_of(checkpoint, inputs, computed(span, inputs)), checkpoint).is_wrong


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"stop": 999}, "out of range"), ({"start": 4, "stop": 2}, "reversed"), ({"numeric_class": "float64"}, "float64")],
)  # fmt: skip
def test_a_computation_that_no_server_does_is_no_evidence(checkpoint, wrong, changes, why):
    signed = evidence_of(checkpoint, wrong.inputs, wrong.outputs, **changes)
    with pytest.raises(BadEvidence, match=why):
        verify(signed, checkpoint)


def test_another_model_is_not_computed_with(checkpoint, wrong):
    with pytest.raises(RootMismatch):
        verify(evidence_of(checkpoint, wrong.inputs, wrong.outputs, root="1" * 64), checkpoint)


@pytest.mark.long
def test_inputs_on_which_rounding_decides_convict_nobody(checkpoint, wrong):
    finding = verify(wrong, checkpoint, VerifyLimits(noise=1e5))  # as if rounding were so coarse
    assert (finding.is_steady, finding.is_wrong) == (False, False)


def test_a_folder_takes_only_so_many_files(tmp_path, wrong):
    folder = Folder(tmp_path / "evidence", EvidenceFileLimits(files_max=1))
    path = folder.keep(wrong)
    assert path is not None
    assert Evidence.load(path).receipt == wrong.receipt
    assert folder.keep(wrong) is None
    assert [each.name for each in folder.path.iterdir()] == [path.name]


def run(*arguments):
    return CliRunner().invoke(command, [str(each) for each in arguments])


def test_the_command_says_who_was_wrong(tmp_path: Path, checkpoint, wrong, honest):
    bad, good = tmp_path / "bad.evidence", tmp_path / "good.evidence"
    bad.write_bytes(wrong.to_bytes())
    good.write_bytes(honest.to_bytes())
    shown = run(bad, checkpoint.model)
    assert (shown.exit_code, SERVER.peer_id in shown.output) == (0, True)
    assert "the server computed wrongly" in shown.output
    assert "2:4 in float32" in run(bad).output
    right = run(good, checkpoint.model)
    assert isinstance(right.exception, NothingShown)
    assert "was right" in str(right.exception)
    bad.write_bytes(wrong.to_bytes()[:-1])
    assert isinstance(run(bad, checkpoint.model).exception, BadEvidence)
    assert isinstance(run(tmp_path / "none").exception, BadEvidence)
