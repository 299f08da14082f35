"""A head that was distilled from a model guesses its tokens, and the text is that of a plain run."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm.client.distilling.loss import foreseen
from swarm.client.distilling.run import Recipe, Source, distil
from swarm.client.hf.distilled import DistilledPredictor
from swarm.client.hf.drafting import drafting_by_head
from swarm.client.hf.outputs import Context
from swarm.client.hf.statedraft import StateDraft
from swarm.errors import BadConfiguration
from swarm.model.checkpoint import open_checkpoint
from swarm.model.draftfiles import save_draft
from swarm.model.drafthead import DraftHead, HeadCache, HeadShape
from swarm.model.loading import load_ends
from tests.client.test_ahead import GREEDY, SEEDED, SPANS, generated, late
from tests.client.test_distilling import stop
from tests.client.test_repair import After, route_of
from tests.families import make
from tests.model.rings import save_family, save_model
from tests.support.inprocess import inprocess
from tests.support.often import rest_is_long

WAYS = {"greedy": GREEDY, "seeded": SEEDED, "seeded, with a penalty": {**SEEDED, "repetition_penalty": 1.2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_family("llama", tmp_path_factory.mktemp("distilled") / "llama")


@pytest.fixture(scope="module")
def full(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def draft(folder, full, tmp_path_factory):
    """A head that has seen what the model writes, and is often right about it."""
    out = tmp_path_factory.mktemp("draft")
    texts = [generated(full, **way)[0] for way in (GREEDY, SEEDED, WAYS["seeded, with a penalty"])]
    recipe = Recipe(width=64, layers=1, mlp=96, steps=80, depths=2)
    assert distil(
        Source(full, "llama", open_checkpoint(folder).root), torch.tensor(texts * 6).int(), out, recipe, stop()
    )
    return out


def drafting(draft, swarm):
    found = drafting_by_head(draft, swarm.checkpoint, load_ends(swarm.checkpoint, dtype=torch.float32))
    return replace(found, always=True)


@pytest.mark.parametrize("way", rest_is_long(WAYS, ("seeded",)))
def test_tokens_and_random_numbers_are_those_of_a_plain_run(folder, full, draft, way):
    expected = generated(full, **WAYS[way])
    with (
        inprocess(folder, *SPANS) as swarm,
        swarm.client(drafting=drafting(draft, swarm)) as model,
        late(model, 0.02),
    ):
        assert generated(model, **WAYS[way]) == expected
        counts = model.last_speculation
        assert counts.right > 0
        assert counts.right + counts.wrong > 5


@pytest.mark.long
@pytest.mark.parametrize("victim", rest_is_long([0, 1, 2], [1]))
def test_a_hop_dies_while_a_head_drafts(folder, full, draft, victim):
    expected = generated(full, **SEEDED)
    with (
        inprocess(folder, *SPANS, *SPANS) as swarm,
        swarm.client(drafting=drafting(draft, swarm)) as model,
        late(model, 0.02),
    ):
        died = []

        def kill():
            died.append(route_of(swarm, model)[victim])
            swarm.crash(died[0])

        assert generated(model, criteria=[After(15, kill)], **SEEDED) == expected
        assert died[0] not in route_of(swarm, model)
        assert model.last_speculation.right + model.last_speculation.wrong > 5


def test_a_head_of_another_model_is_refused(draft, tmp_path):
    config = make("llama")
    config.rms_norm_eps = 1e-5
    other = open_checkpoint(save_model(config, tmp_path / "other"))
    with pytest.raises(BadConfiguration, match="of another model"):
        drafting_by_head(draft, other, load_ends(other))


def test_a_family_without_a_named_norm_is_refused(tmp_path):
    checkpoint = open_checkpoint(save_family("bloom", tmp_path / "bloom"))
    shape = HeadShape(hidden_size=64, embedding_size=64, width=32, mlp=32, layers=1, heads=1, head_size=32, window=8)
    save_draft(DraftHead(shape), tmp_path / "draft", root=checkpoint.root, model="bloom")
    with pytest.raises(BadConfiguration, match="which norm is their last"):
        drafting_by_head(tmp_path / "draft", checkpoint, load_ends(checkpoint))


def small_head(layers=2, window=6):
    torch.manual_seed(5)
    shape = HeadShape(
        hidden_size=64, embedding_size=64, width=32, mlp=48, layers=layers, heads=2, head_size=16, window=window
    )
    return DraftHead(shape).eval()


@torch.no_grad()
def test_training_sees_what_drafting_sees():
    """Each depth of a window is the state that a head has behind so many of its own."""
    head = small_head(window=64)
    states, embedded = torch.randn(1, 12, 64), torch.randn(1, 12, 64)
    depths = foreseen(head, states, embedded, 4)
    for entry in range(3, 12):
        for depth in range(4):
            known = entry - depth
            cache = HeadCache(head.shape)
            last = head.follow(states[:, : known + 1], embedded[:, : known + 1], 1, cache)
            for behind in range(known + 1, entry + 1):
                last = head.follow(last, embedded[:, behind : behind + 1], behind + 1, cache)
            torch.testing.assert_close(last[0, 0], depths[depth][0, entry], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_long_text_is_the_same_in_pieces():
    head = small_head()
    states, embedded = torch.randn(1, 40, 64), torch.randn(1, 40, 64)
    whole = head.follow(states, embedded, 1, HeadCache(head.shape))
    cache = HeadCache(head.shape)
    for begin, end in ((0, 1), (1, 9), (9, 10), (10, 39), (39, 40)):
        last = head.follow(states[:, begin:end], embedded[:, begin:end], 1 + begin, cache)
    torch.testing.assert_close(last, whole, atol=1e-5, rtol=1e-4)
    reach = 1 + 2 * (6 - 1)  # of two layers that see six entries each
    alone = head.follow(states[:, -reach:], embedded[:, -reach:], 41 - reach, HeadCache(head.shape))
    torch.testing.assert_close(alone, whole, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_long_text_holds_no_more_than_its_windows():
    head = small_head()
    cache = HeadCache(head.shape)
    states, embedded = torch.randn(1, 50, 64), torch.randn(1, 50, 64)
    head.follow(states, embedded, 1, cache)
    assert [held[0].shape[2] for held in cache._layers] == [18, 18]
    cache.crop(-12)  # a window is left
    fresh = HeadCache(head.shape)
    head.follow(states[:, :38], embedded[:, :38], 1, fresh)
    last = [head.follow(states[:, -1:], embedded[:, -1:], 39, each) for each in (cache, fresh)]
    torch.testing.assert_close(*last, atol=1e-5, rtol=1e-4)
    cache.crop(-100)
    assert head.follow(states[:, :2], embedded[:, :2], 1, cache).isfinite().all()


def test_guesses_follow_a_text_that_is_taken_back(full):
    draft = StateDraft.of(DistilledPredictor.of(small_head(window=64), full), full)
    hidden = torch.randn(30, 64, generator=torch.Generator().manual_seed(3))
    text = list(range(3, 33))
    growing = Context()
    growing.outputs.note(0, hidden[:20])
    guesses = draft.draft(growing)
    guesses.propose(text[:21], [], 4)
    growing.outputs.note(10, hidden[20:21])  # the text behind position 9 is another one
    back = [*text[:10], 7, 8]
    fresh = Context()
    fresh.outputs.note(0, torch.cat([hidden[:10], hidden[20:21]]))
    expected = draft.draft(fresh).propose(back, [], 3)
    found = guesses.propose(back, [], 3)
    assert [guess.token for guess in found] == [guess.token for guess in expected]
    assert len(found) == 3
