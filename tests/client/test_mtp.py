"""A checkpoint's own blocks for multi-token prediction guess as in `transformers`, with a plain run's tokens."""

import json
import shutil
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator

from swarm.blocks import Blocks
from swarm.client.hf.drafting import drafting_by_mtp
from swarm.client.hf.mtp import MtpPredictor
from swarm.client.hf.outputs import Context, Outputs
from swarm.client.hf.statedraft import StateDraft, StateGuesses
from swarm.errors import BadConfiguration, ChecksumMismatch, UnsupportedCheckpoint
from swarm.model.checkpoint import open_checkpoint
from swarm.model.loading import ends_files, load_ends, needed_tensors
from swarm.model.mtp import load_mtp
from tests.client.test_ahead import GREEDY, SEEDED, generated, late
from tests.families import make
from tests.model.rings import save_model
from tests.support.inprocess import inprocess

BLOCKS = 6
EXTRA = "mtp.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny DeepSeek-V3 of six blocks, and behind them one that predicts a token more."""
    config = make("deepseek_v3")
    config.num_hidden_layers = BLOCKS + 1  # the last one becomes the additional one
    directory = save_model(config, tmp_path_factory.mktemp("mtp") / "deepseek_v3")
    written = json.loads((directory / "config.json").read_text())
    written["num_hidden_layers"] = BLOCKS
    (directory / "config.json").write_text(json.dumps(written))
    rng, width = torch.Generator().manual_seed(9), config.hidden_size
    new = {f"{name}.weight": 1 + 0.1 * torch.randn(width, generator=rng) for name in ("enorm", "hnorm")}
    new["shared_head.norm.weight"] = 1 + 0.1 * torch.randn(width, generator=rng)
    new["eh_proj.weight"] = torch.randn(width, 2 * width, generator=rng) / width**0.5
    tensors = {f"model.layers.{BLOCKS}.{name}": tensor for name, tensor in new.items()}
    save_file(tensors, directory / EXTRA, metadata={"format": "pt"})
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= dict.fromkeys(tensors, EXTRA)
    path.write_text(json.dumps(index))
    return directory


@pytest.fixture(scope="module")
def full(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{BLOCKS}\."]  # the family knows block 61 alone
    return model


@pytest.fixture(scope="module")
def swarm(folder):
    with inprocess(folder, "0:2", "2:6") as swarm:
        yield swarm


@pytest.fixture(scope="module")
def mtp(folder):
    checkpoint = open_checkpoint(folder)
    ends = load_ends(checkpoint, dtype=torch.float32)
    return StateDraft.of(MtpPredictor(load_mtp(checkpoint, ends)), ends)


def test_the_first_guess_is_that_of_transformers(full, swarm):
    theirs, ours = {}, {}
    stock, propose = MTPCandidateGenerator.get_candidates, StateGuesses.propose

    def candidates(generator, input_ids, *arguments, **how):
        found = stock(generator, input_ids, *arguments, **how)
        if found[1] is not None:
            theirs[tuple(input_ids[0].tolist())] = int(found[0][0, input_ids.shape[1]])
        return found

    def proposed(draft, text, guesses, count):
        found = propose(draft, text, guesses, count)
        if found and not guesses:
            ours[tuple(text)] = found[0].token
        return found

    with (
        patch.object(MTPCandidateGenerator, "get_candidates", candidates),
        patch.object(StateGuesses, "propose", proposed),
        swarm.client() as model,
        late(model, 0.03),
    ):
        expected = generated(full, **GREEDY)[0]
        assert generated(full, use_mtp=True, **GREEDY)[0] == expected
        assert generated(model, use_mtp=True, **GREEDY)[0] == expected
    both = theirs.keys() & ours.keys()
    assert len(both) > 20
    assert [ours[text] for text in both] == [theirs[text] for text in both]
    assert len({ours[text] for text in both}) > 3


@pytest.mark.long
@pytest.mark.parametrize("way", [GREEDY, pytest.param({**SEEDED, "repetition_penalty": 1.2}, marks=pytest.mark.long)])
def test_tokens_and_random_numbers_are_those_of_a_plain_run(full, swarm, way):
    expected = generated(full, **way)
    with swarm.client() as model, late(model, 0.03):
        assert generated(model, use_mtp=True, **way) == expected
        counts = model.last_speculation
        assert counts.right + counts.wrong > 0  # how many depends on what they cost here: none of them is right
        with model.inference_session():
            first = generated(model, tokens=8, use_mtp=True, **way)[0]
            plain = generated(model, torch.tensor([[*first, 5, 6]]), tokens=4, **way)[0]
            again = torch.tensor([[*plain, 7]])
            assert generated(model, again, use_mtp=True, **way) == generated(full, again, **way)


def test_guesses_are_those_of_a_draft_that_comes_to_the_text_at_once(mtp):
    width, rng = mtp.predictor.model.config.hidden_size, torch.Generator().manual_seed(3)
    text = torch.randint(3, 120, (40,), generator=rng).tolist()
    hidden = torch.randn(40, width, generator=rng)

    def outputs(stop):
        found = Outputs()
        found.note(2, hidden[2:stop])
        return found

    growing = Context(outputs=outputs(3))
    draft = mtp.draft(growing)
    for length in range(4, 40):
        growing.outputs.note(length - 2, hidden[length - 2 : length - 1])
        found = draft.propose(text[:length], [], 3)
        fresh = mtp.draft(Context(outputs=outputs(length - 1)))
        assert [guess.token for guess in found] == [guess.token for guess in fresh.propose(text[:length], [], 3)]
        assert len(found) == 3
        if length % 3 and length < 39:
            text[length] = found[0].token  # most guesses are right
    back = [*text[:10], 7, 8]  # some of it is taken back, and goes on otherwise
    growing.outputs.note(10, hidden[20:21])
    other = outputs(10)
    other.note(10, hidden[20:21])
    expected = mtp.draft(Context(outputs=other)).propose(back, [], 2)
    assert [guess.token for guess in draft.propose(back, [], 2)] == [guess.token for guess in expected]


def test_nothing_is_guessed_before_an_output_is_known(mtp):
    assert mtp.draft(Context()).propose([1, 2, 3], [], 4) == []


def test_models_without_such_blocks_say_so(folder, tmp_path, swarm):
    plain = open_checkpoint(save_model(make("llama"), tmp_path / "llama"))
    with pytest.raises(BadConfiguration, match="multi-token prediction"):
        drafting_by_mtp(plain, load_ends(plain))
    without = open_checkpoint(save_model(make("deepseek_v3"), tmp_path / "without"))
    with pytest.raises(UnsupportedCheckpoint, match="multi-token prediction"):
        drafting_by_mtp(without, load_ends(without))


def test_neither_ends_nor_spans_fetch_their_weights(folder):
    checkpoint = open_checkpoint(folder)
    assert EXTRA in checkpoint.manifest.files
    assert EXTRA not in ends_files(checkpoint)
    needs = needed_tensors(checkpoint, Blocks(4, BLOCKS))
    assert {name for name in checkpoint.index.weight_map if needs(name)} == {
        name for name in checkpoint.index.weight_map if name.startswith(("model.layers.4.", "model.layers.5."))
    }


def test_their_weights_are_verified(folder, tmp_path):
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    checkpoint = open_checkpoint(copied)
    ends = load_ends(checkpoint)
    data = bytearray((copied / EXTRA).read_bytes())
    data[-3] ^= 64
    (copied / EXTRA).write_bytes(data)
    with pytest.raises(ChecksumMismatch):
        load_mtp(checkpoint, ends)
