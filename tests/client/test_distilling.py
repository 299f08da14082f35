"""Making a draft head: from texts to windows, through a swarm, and on from wherever it was stopped."""

import errno
import os
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm.client.distilling.cli import command
from swarm.client.distilling.limits import DistilLimits
from swarm.client.distilling.muon import Muon
from swarm.client.distilling.run import Recipe, Source, Stop, distil
from swarm.client.distilling.texts import texts_in, windows
from swarm.client.distilling.training import chosen
from swarm.client.distilling.work import Work
from swarm.demo.cli import CHECKPOINT
from swarm.errors import BadConfiguration
from swarm.model.checkpoint import open_checkpoint
from swarm.model.draftfiles import DraftConfig, is_draft, load_draft_head
from tests.model.rings import save_family
from tests.support.inprocess import inprocess

RECIPE = Recipe(width=32, layers=1, mlp=48, steps=12, rows=4, depths=2, alone=0.5)


class StopsAfter(Stop):
    """Is asked to stop when it was looked at so many times."""

    def __init__(self, looks):
        self._left = looks

    @property
    def asked(self):
        self._left -= 1
        return self._left < 0


def stop():
    return StopsAfter(10**9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_family("llama", tmp_path_factory.mktemp("distilling") / "llama")


@pytest.fixture(scope="module")
def source(folder):
    full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Source(full, "llama", open_checkpoint(folder).root)


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(3, 120, (40, 16), dtype=torch.int32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def made(source, tokens, tmp_path_factory):
    """A draft that was made without a break."""
    out = tmp_path_factory.mktemp("made")
    assert distil(source, tokens, out, RECIPE, stop())
    return out


def contents(out):
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def test_a_draft_is_two_files_that_load(made, source):
    assert sorted(path.name for path in made.iterdir()) == ["draft.json", "draft.safetensors"]
    head = load_draft_head(made, root=source.root, sizes=(64, 64), dtype=torch.float32, device=torch.device("cpu"))
    assert head.shape.width == RECIPE.width


@pytest.mark.parametrize("looks", [1, 3, 4, 10])
def test_a_draft_that_was_stopped_ends_the_same(made, source, tokens, tmp_path, looks):
    """Stopped among the states, between them and the training, or among its steps."""
    limits = DistilLimits(step_rows_max=16)
    rounds = 1
    while not distil(source, tokens, tmp_path, RECIPE, StopsAfter(looks), limits):
        rounds += 1
        assert rounds < 40
    assert rounds > 1
    assert contents(tmp_path) == contents(made)


def test_a_stopped_training_leaves_a_draft_that_loads(source, tokens, tmp_path):
    assert not distil(source, tokens, tmp_path, RECIPE, StopsAfter(6))
    assert is_draft(tmp_path)
    load_draft_head(tmp_path, root=source.root, sizes=(64, 64), dtype=torch.float32, device=torch.device("cpu"))


def test_states_cut_off_by_a_kill_are_computed_again(made, source, tokens, tmp_path):
    limits = DistilLimits(step_rows_max=8)
    assert not distil(source, tokens, tmp_path, RECIPE, StopsAfter(3), limits)
    states = tmp_path / "work" / "states"
    with states.open("r+b") as file:
        file.truncate(states.stat().st_size - 100)
    assert distil(source, tokens, tmp_path, RECIPE, stop(), limits)
    assert contents(tmp_path) == contents(made)


@pytest.mark.long
def test_a_head_learns_at_every_depth(source, tokens, tmp_path, capsys):
    """Those held out are windows that it has seen."""
    recipe = Recipe(width=64, layers=1, mlp=96, steps=120, rows=8, depths=2, alone=0.5)
    assert distil(source, tokens[:6].repeat(8, 1), tmp_path, recipe, stop())
    right = [float(each) for each in capsys.readouterr().out.split(":")[1].split(",")]
    assert len(right) == 2
    assert min(right) > 0.5


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_steps_are_those_of_torchs_own_optimizer():
    rng = torch.Generator().manual_seed(2)
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in ((6, 3), (3, 6))] for _ in range(2))
    optimizers = Muon(ours), torch.optim.Muon(theirs, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=rng)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-2)  # both multiply in bfloat16


def test_states_through_a_swarm_are_those_of_the_model(folder, source, tokens):
    with inprocess(folder, "0:2", "2:6") as swarm, swarm.client() as model:
        through = Source(model, "llama", source.root).states(tokens[:5])
        torch.testing.assert_close(through, source.states(tokens[:5]), atol=1e-4, rtol=1e-4)


def test_a_folder_with_other_work_is_refused(source, tokens, tmp_path):
    assert not distil(source, tokens, tmp_path, RECIPE, StopsAfter(0))
    with pytest.raises(BadConfiguration, match="a half-made draft of other texts, windows"):
        distil(source, tokens[:20], tmp_path, RECIPE, stop())


def test_a_damaged_training_says_what_to_delete(source, tokens, tmp_path):
    assert not distil(source, tokens, tmp_path, RECIPE, StopsAfter(6))
    path = tmp_path / "work" / "training.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(BadConfiguration, match=r"training\.safetensors' does not load: .*delete it"):
        distil(source, tokens, tmp_path, RECIPE, stop())


def test_a_full_disk_is_told_before_anything_is_computed(source, tokens, tmp_path):
    plan = source.plan(tokens, RECIPE)
    with pytest.raises(BadConfiguration, match="take fewer --tokens"):
        Work.begin(tmp_path / "work", plan, DistilLimits(free_bytes_min=1 << 60))
    assert not (tmp_path / "work" / "plan.json").exists()


def test_training_in_bfloat16_warns_of_nothing(source, tokens, tmp_path):
    assert distil(source, tokens, tmp_path, replace(RECIPE, autocast=True), stop())


def test_a_disk_that_is_full_stops_it_where_it_goes_on(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.py").write_text("def one(x):\n    return x + 1\n" * 200)
    arguments = [str(CHECKPOINT), "--texts", str(texts), "--out", str(tmp_path / "draft"), "--local"]
    arguments += ["--tokens", "1000", "--positions", "32", "--steps", "2", "--width", "32", "--layers", "1"]
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with patch.object(Work, "add", side_effect=full), pytest.raises(BadConfiguration, match=r"No space left.*goes on"):
        CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert "the draft is complete" in CliRunner().invoke(command, arguments, catch_exceptions=False).output


def test_few_logits_are_enough(source, tokens, tmp_path):
    assert distil(source, tokens, tmp_path, RECIPE, stop(), DistilLimits(logits_max=128 * 4 * 3))


def test_all_windows_are_taken_before_one_is_taken_again():
    for usable, rows in ((10, 4), (3, 8), (16, 16)):
        steps = 30
        taken = torch.cat([chosen(step, rows, usable, 7) for step in range(steps)]).tolist()
        assert len(taken) == rows * steps
        assert all(
            sorted(taken[begin : begin + usable]) == list(range(usable))
            for begin in range(0, len(taken) - usable + 1, usable)
        )


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def test_windows_have_all_of_the_text_once(tokenizer):
    texts = ["def one():\n    return 1\n" * 9, "x = 2\n" * 30]
    found = windows(tokenizer, texts, positions=16, windows_max=99, vocabulary=2048)
    assert found.dtype == torch.int32
    assert set(found[:, 0].tolist()) == {tokenizer.bos_token_id}
    joined = tokenizer.eos_token.join([*texts, ""])
    assert joined.startswith(tokenizer.decode(found[:, 1:].flatten()))
    assert len(windows(tokenizer, texts, positions=16, windows_max=3, vocabulary=2048)) == 3


def test_texts_that_are_too_short_are_refused(tokenizer):
    with pytest.raises(BadConfiguration, match="fewer than 32 tokens"):
        windows(tokenizer, ["x"], positions=16, windows_max=9, vocabulary=2048)


def test_tokens_that_the_model_has_not_are_refused(tokenizer):
    with pytest.raises(BadConfiguration, match="the model, with 100, has not"):
        windows(tokenizer, ["def f():\n" * 40], positions=16, windows_max=9, vocabulary=100)


def test_only_texts_are_read(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "deep" / "er" / "a.txt").write_text("one")
    (tmp_path / "b.py").write_text("zwei, äöü")
    (tmp_path / ".git" / "c").write_text("hidden")
    (tmp_path / "d.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "e").write_text(" \n")
    assert sorted(texts_in(tmp_path)) == ["one", "zwei, äöü"]
    cut = DistilLimits(file_bytes_max=7)
    assert sorted(texts_in(tmp_path, cut)) == ["one", "zwei, "]
    with pytest.raises(BadConfiguration, match="files; 2 at most"):
        list(texts_in(tmp_path, DistilLimits(files_max=2)))


def test_the_command_makes_a_draft_of_a_local_model(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.py").write_text("def one(x):\n    return x + 1\n" * 200)
    arguments = [str(CHECKPOINT), "--texts", str(texts), "--out", str(tmp_path / "draft"), "--local"]
    arguments += ["--tokens", "1000", "--positions", "32", "--steps", "2", "--width", "32", "--layers", "1"]
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert "the draft is complete" in done.output
    config = DraftConfig.model_validate_json((tmp_path / "draft" / "draft.json").read_bytes())
    assert config.root == open_checkpoint(CHECKPOINT).root
    with pytest.raises(BadConfiguration, match="has a draft that is complete"):
        CliRunner().invoke(command, arguments, catch_exceptions=False)


def test_the_command_says_what_is_wrong(tmp_path):
    out = ["--out", str(tmp_path / "draft"), "--local"]
    assert "does not exist" in CliRunner().invoke(command, ["m", "--texts", str(tmp_path / "no"), *out]).output
    there = ["--texts", str(tmp_path), *out]
    assert "say which MODEL" in CliRunner().invoke(command, there).output
    assert "multiple of 16" in CliRunner().invoke(command, ["m", *there, "--width", "33"]).output
    with pytest.raises(BadConfiguration, match="device: 'abacus'"):
        CliRunner().invoke(command, [str(CHECKPOINT), *there, "--device", "abacus"], catch_exceptions=False)
    with pytest.raises(BadConfiguration, match="the model has 1024"):
        CliRunner().invoke(command, [str(CHECKPOINT), *there, "--positions", "2048"], catch_exceptions=False)
