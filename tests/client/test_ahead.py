"""Guesses that travel ahead of `generate()`: the tokens, and the random numbers, are those of a plain run."""

import copy
import threading
import time
from contextlib import contextmanager
from random import Random
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StoppingCriteriaList

from swarm.client.hf.lead import Drafting
from swarm.client.hf.swarm import WaitingSession
from swarm.client.speculation.drafts import Guess
from swarm.errors import BadConfiguration
from tests.client.test_repair import After, leases, route_of
from tests.families import make
from tests.model.rings import save_family
from tests.support.inprocess import inprocess
from tests.support.often import rest_is_long
from tests.support.swarms import eventually

IDS = torch.randint(3, 120, (1, 12), generator=torch.Generator().manual_seed(5))
SPANS = ("0:2", "2:4", "4:6")
GREEDY = {"do_sample": False}
SEEDED = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
WAYS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "seeded, with a penalty": {**SEEDED, "repetition_penalty": 1.2},
    "greedy, no n-gram twice": {**GREEDY, "no_repeat_ngram_size": 2},
}


class Oracle:
    """A draft that knows the text, and is wrong so often as it is told."""

    def __init__(self, text, right):
        self._text, self._right, self._rng = text, right, Random(3)

    def propose(self, text, guesses, count):
        known = len(text) + len(guesses)
        return [
            Guess(token if self._rng.random() < self._right else (token + 1) % 100, 0)
            for token in self._text[known : known + count]
        ]


class Tokens:
    """A streamer that keeps what comes."""

    def __init__(self):
        self.came = []

    def put(self, ids):
        self.came.append(ids.tolist())

    def end(self):
        self.came.append("end")


def generated(model, ids=IDS, tokens=48, criteria=(), **how):
    """Return the tokens, what the streamer got, and the state of the random numbers."""
    torch.manual_seed(7)
    streamer = Tokens()
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        eos_token_id=None,
        streamer=streamer,
        stopping_criteria=StoppingCriteriaList(criteria),
        **how,
    )
    return found[0].tolist(), streamer.came, torch.get_rng_state().tolist()


@contextmanager
def late(model, delay_s):
    """Have every answer to a step that was put ahead come later, as over a wide-area route."""
    opening = model.backend.open_session

    def open_session(*arguments, **bounds):
        session = opening(*arguments, **bounds)
        put, step = session.put, session.step

        def stepped(*arguments, **which):
            time.sleep(delay_s)
            return step(*arguments, **which)

        session.put = lambda *arguments, **which: Late(put(*arguments, **which), time.perf_counter() + delay_s)
        session.step = stepped
        return session

    model.backend.open_session = open_session
    yield
    model.backend.open_session = opening


class Late:
    def __init__(self, pending, at):
        self._pending, self._at = pending, at

    @property
    def is_done(self):
        return time.perf_counter() >= self._at and self._pending.is_done

    def wait(self):
        time.sleep(max(0.0, self._at - time.perf_counter()))
        return self._pending.wait()


def knowing(text, right=0.8):
    return Drafting(lambda: Oracle(text, right), always=True)


def beside(full, noise):
    """Return a model whose likeliest tokens are often those of another."""
    small = copy.deepcopy(full)
    rng = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weights in small.parameters():
            weights.add_(torch.randn(weights.shape, generator=rng) * noise * weights.std(unbiased=False))
    return small


FAMILIES = ["llama", "gemma3_text", "qwen3_moe", "deepseek_v3", "opt", "bloom"]


@pytest.fixture(scope="module", params=rest_is_long(FAMILIES, FAMILIES[1:2]))
def world(request, tmp_path_factory):
    folder = save_family(request.param, tmp_path_factory.mktemp("ahead") / request.param)
    full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with inprocess(folder, *SPANS) as swarm, swarm.client() as model:
        yield swarm, model, full


@pytest.mark.parametrize("way", rest_is_long(WAYS, ("seeded, with a penalty",)))
def test_tokens_and_random_numbers_are_those_of_a_plain_run(world, way):
    swarm, model, full = world
    expected = generated(full, **WAYS[way])
    assert generated(model, **WAYS[way]) == expected
    with swarm.client(drafting=knowing(expected[0])) as ahead:
        assert generated(ahead, **WAYS[way]) == expected
        counts = ahead.last_speculation
        assert counts.right > 10  # or nothing was tried
        assert counts.wrong > 1
        assert counts.tokens == 47
    eventually(lambda: not any(sessions for sessions, _ in leases(swarm.servers)), 10)


@pytest.mark.long
def test_look_up_is_asked_for_as_in_transformers(world):
    _, model, full = world
    ids = IDS.repeat(1, 3)
    for how in (GREEDY, SEEDED):
        assert generated(model, ids, prompt_lookup_num_tokens=6, **how) == generated(full, ids, **how)
    assert model.last_speculation.tokens == 47


@pytest.mark.parametrize("way", rest_is_long(WAYS, ("seeded, with a penalty",)))
def test_a_model_drafts_as_in_transformers(world, way):
    """Tokens and random numbers are those of a plain run, and not those of its assisted generation."""
    _, model, full = world
    expected = generated(full, **WAYS[way])
    small = beside(full, 0.05)
    with late(model, 0.05):  # else a busy machine may find drafting not worth its time
        assert generated(model, assistant_model=small, **WAYS[way]) == expected
        counts = model.last_speculation
    assert counts.right + counts.wrong > 0  # how many depends on how quick the draft model is beside the servers
    assert counts.tokens == 47
    assert generated(model, assistant_model=small, **WAYS[way]) == expected  # on the same draft model


@pytest.mark.parametrize(("load", "guesses"), rest_is_long([(0.0, True), (9.0, False)], [(9.0, False)]))
def test_busy_hops_get_no_guesses_that_nobody_asked_for(full, spare, load, guesses):
    expected = generated(full, **GREEDY)
    with (
        spare.client(drafting=Drafting(lambda: Oracle(expected[0], 0.9))) as model,
        late(model, 0.03),
        patch.object(WaitingSession, "load", load),
    ):
        assert generated(model, **GREEDY) == expected
        counts = model.last_speculation
        assert bool(counts.right + counts.wrong) is guesses


def test_a_draft_model_that_is_always_right_saves_most_trips(full, spare):
    expected = generated(full, **GREEDY)
    with spare.client() as model, late(model, 0.1):  # so long that a draft on a busy machine fills it
        assert generated(model, assistant_model=full, **GREEDY) == expected
        counts = model.last_speculation
        assert counts.right > 30
        assert counts.tokens_a_trip > 2


def test_a_draft_model_guesses_what_sampling_is_about_to_draw(full, spare):
    """The draft is the model itself, so that every guess is right."""
    settings = {**SEEDED, "top_k": 40, "repetition_penalty": 1.2}
    expected = generated(full, **settings)
    with spare.client() as model, late(model, 0.1):
        assert generated(model, assistant_model=full, **settings) == expected
        counts = model.last_speculation
        assert counts.right > 20
        assert counts.wrong < 3  # guesses of look-up


def test_a_draft_model_that_fails_is_left(full, spare):
    small = copy.deepcopy(full)
    called = []

    def fail(*_):
        called.append(1)
        raise RuntimeError("out of memory")

    small.register_forward_pre_hook(fail)
    with spare.client() as model:
        assert generated(model, assistant_model=small, **GREEDY) == generated(full, **GREEDY)
    assert len(called) == 1


def test_a_draft_model_of_another_vocabulary_is_refused(full, spare, tmp_path):
    config = copy.deepcopy(full.config)
    config.vocab_size = 64
    other = AutoModelForCausalLM.from_config(config)
    with spare.client() as model, pytest.raises(BadConfiguration, match="64 tokens"):
        generated(model, assistant_model=other, **GREEDY)
    folder = save_family("mamba2", tmp_path / "mamba2")
    recurrent = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with spare.client() as model, pytest.raises(BadConfiguration, match="recurrent"):
        generated(model, assistant_model=recurrent, **GREEDY)


def test_no_thread_stays_when_a_text_is_done(full, spare):
    with spare.client() as model:
        generated(model, assistant_model=full, **GREEDY)
        eventually(lambda: not [each for each in threading.enumerate() if each.name == "swarm-draft"], 10)


def test_a_recurrent_family_generates_as_ever(tmp_path):
    """Its state cannot be taken back, so nothing is guessed."""
    folder = save_family("mamba2", tmp_path / "mamba2")
    full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = generated(full, tokens=12, **GREEDY)
    with inprocess(folder, *SPANS) as swarm, swarm.client(drafting=knowing(expected[0], 1.0)) as model:
        assert generated(model, tokens=12, **GREEDY) == expected
        assert model.last_speculation.right == 0
        assert "mamba2" in model.last_speculation.off
        small = AutoModelForCausalLM.from_config(make("llama"))
        assert generated(model, tokens=12, assistant_model=small, **GREEDY) == expected


@pytest.fixture(scope="module")
def spare(checkpoint):
    """Two servers of each span."""
    with inprocess(checkpoint, *SPANS, *SPANS) as swarm:
        yield swarm


@pytest.mark.parametrize(("victim", "right"), rest_is_long([(0, 1.0), (1, 0.7), (2, 0.7), (2, 1.0)], [(1, 0.7)]))
def test_a_hop_dies_with_guesses_in_flight(checkpoint, full, victim, right):
    expected = generated(full, **SEEDED)
    with (
        inprocess(checkpoint, *SPANS, *SPANS) as swarm,
        swarm.client(drafting=knowing(expected[0], right)) as model,
    ):
        died = []

        def kill():
            died.append(route_of(swarm, model)[victim])
            swarm.crash(died[0])

        assert generated(model, criteria=[After(15, kill)], **SEEDED) == expected
        assert died[0] not in route_of(swarm, model)
        assert model.last_speculation.right > 10


def test_a_hop_leaves_with_guesses_in_flight(checkpoint, full, spare):
    expected = generated(full, **GREEDY)
    with spare.client(drafting=knowing(expected[0], 1.0)) as model:
        left = []

        def leave():
            left.append(route_of(spare, model)[1])
            spare.loop.start(left[0].handler.drain(20.0))

        assert generated(model, criteria=[After(10, leave)], **GREEDY) == expected
        assert left[0] not in route_of(spare, model)


def test_blocks_on_this_machine_take_guesses_too(checkpoint, full, spare):
    expected = generated(full, **SEEDED)
    with spare.client(local_blocks=2, drafting=knowing(expected[0])) as model:
        assert generated(model, **SEEDED) == expected
        assert model.last_speculation.right > 10


def test_a_chat_goes_on_with_and_without_guesses(full, spare):
    with spare.client() as model, model.inference_session(max_length=200):
        text, said = IDS, IDS
        for turn, more in enumerate(({"prompt_lookup_num_tokens": 4}, {}, {"prompt_lookup_num_tokens": 4})):
            expected, *_ = generated(full, said, tokens=16, **GREEDY)
            found, *_ = generated(model, said, tokens=16, **GREEDY, **more)
            assert found == expected, f"turn {turn}"
            text = torch.tensor([found])
            said = torch.cat([text, IDS[:, : 4 + turn]], dim=1)


def test_no_guess_goes_beyond_the_models_positions(full, spare):
    ids = torch.randint(3, 120, (1, 200), generator=torch.Generator().manual_seed(6))
    expected = generated(full, ids, tokens=56, **GREEDY)  # 256 positions in all
    with spare.client(drafting=knowing([*expected[0], *range(3, 90)], 1.0)) as model:
        assert generated(model, ids, tokens=56, **GREEDY) == expected


def test_a_batch_is_not_guessed(full, spare):
    ids = IDS.repeat(2, 1)
    with spare.client(drafting=knowing(IDS[0].tolist())) as model:
        assert generated(model, ids, tokens=8, **GREEDY)[0] == generated(full, ids, tokens=8, **GREEDY)[0]
        assert model.last_speculation.tokens == 0


def test_a_past_of_unknown_tokens_is_not_guessed_behind(full, spare):
    """The prompt came as embeddings."""
    with spare.client(drafting=knowing([*IDS[0].tolist(), *range(3, 90)], 1.0)) as model, torch.no_grad():
        caches = [DynamicCache(config=full.config), model.new_cache()]
        for each, cache in zip((full, model), caches, strict=True):
            each(inputs_embeds=full.get_input_embeddings()(IDS), past_key_values=cache, use_cache=True)
        for token in range(5, 15):
            ids = torch.tensor([[token]])
            expected, got = (
                each(ids, past_key_values=cache, use_cache=True).logits
                for each, cache in zip((full, model), caches, strict=True)
            )
            assert torch.allclose(expected, got, atol=1e-5)
        assert model.last_speculation.tokens == 0


@pytest.mark.long
def test_threads_that_guess_at_once_do_not_mix(full, spare):
    """Each opens sessions again and again, at the same moments as the others."""
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompts = torch.randint(3, 120, (8, 6), generator=torch.Generator().manual_seed(9)).repeat(1, 2)
    expected = [full.generate(ids[None], **settings).tolist() for ids in prompts]
    found, at_once = {}, threading.Barrier(len(prompts))
    with spare.client() as model:

        def work(index):
            for turn in range(10):
                at_once.wait(30)
                ids = prompts[index][None]
                found[index, turn] = model.generate(ids, prompt_lookup_num_tokens=4, **settings).tolist()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 80
    assert all(got == expected[index] for (index, _), got in found.items())


@pytest.mark.parametrize("rollback_max", [1, 8])
def test_guesses_are_taken_back_beyond_the_callers_rollback(full, spare, rollback_max):
    """Wrong far behind the first token: more is taken back than the caller means to."""
    expected = generated(full, **GREEDY)
    with (
        spare.client(drafting=knowing(expected[0], 0.9)) as model,
        model.inference_session(max_length=200, rollback_max=rollback_max),
        late(model, 0.02),
    ):
        assert generated(model, **GREEDY)[0] == expected[0]
        assert model.last_speculation.wrong > 0
