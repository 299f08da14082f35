"""A head in 8 bits under `generate()`: tokens and random numbers are those of the exact head."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from swarm.client.hf.auto import AutoDistributedModel
from swarm.client.hf.head import HeadedModel, prepare_head
from swarm.errors import BadConfiguration
from swarm.model.checkpoint import open_checkpoint
from swarm.model.eightbits import is_supported
from swarm.model.loading import load_ends
from tests.client.test_ahead import knowing, late
from tests.model.rings import save_family
from tests.support.often import rest_is_long

pytestmark = pytest.mark.skipif(not is_supported(), reason="torch has no int8 products on this processor")

IDS = torch.randint(3, 120, (1, 12), generator=torch.Generator().manual_seed(5))
TOP_K = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.9}
WAYS = {
    "greedy": {"do_sample": False},
    "greedy, with a penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "greedy, not these": {"do_sample": False, "suppress_tokens": [5, 9], "all_new": True},
    "greedy, not cached": {"do_sample": False, "use_cache": False},
    "seeded": {"do_sample": True, "top_k": 0},
    "seeded, warm": {"do_sample": True, "top_k": 0, "temperature": 0.7, "repetition_penalty": 1.1},
    "seeded, top-k": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "seeded, top-k, top-p": TOP_K,
}
WHOLE = {
    "seeded, top-p of all": {"do_sample": True, "top_k": 0, "top_p": 0.9},
    "greedy, no n-gram twice": {"do_sample": False, "no_repeat_ngram_size": 2},
    "seeded, min-p": {"do_sample": True, "min_p": 0.1},
    "beams": {"num_beams": 2, "do_sample": False},
    "logits are returned": {"do_sample": False, "output_logits": True, "return_dict_in_generate": True},
    "scores are returned": {"do_sample": False, "output_scores": True, "return_dict_in_generate": True},
}


def generated(model, ids=IDS, tokens=16, all_new=False, **how):
    """Return the tokens, and the state of the random numbers. all_new: no token may end the text."""
    torch.manual_seed(7)
    if all_new:
        how["min_new_tokens"] = tokens
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, eos_token_id=[1], pad_token_id=0, **how
    )
    tokens = found if isinstance(found, torch.Tensor) else found.sequences
    return tokens.tolist(), torch.get_rng_state().tolist(), getattr(found, "logits", getattr(found, "scores", None))


def headed(folder, dtype=torch.float32):
    """Return a stock model, and the same with a head in 8 bits."""
    checkpoint = open_checkpoint(folder)
    ends = load_ends(checkpoint, dtype=dtype)
    prepare_head(ends, checkpoint.traits, "auto")
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.set_output_embeddings(ends.get_output_embeddings())
    cls = type(model)
    model.__class__ = type(cls.__name__, (HeadedModel, cls), {"__module__": cls.__module__})
    model._facts = ends._facts
    return stock, model


@pytest.fixture(scope="module")
def models(checkpoint):
    return headed(checkpoint)


def count(model):
    facts = model.head_facts
    return facts.proven, facts.whole


# The same tokens


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_tokens_and_random_numbers_are_the_exact_heads(models, how):
    stock, model = models
    proven, whole = count(model)
    for tokens in (1, 16):
        assert generated(model, tokens=tokens, **how) == generated(stock, tokens=tokens, **how)
    assert count(model)[0] - proven > 17 / 2
    assert sum(count(model)) - proven - whole == 17


@pytest.mark.parametrize("how", WHOLE.values(), ids=WHOLE)
def test_calls_that_need_all_logits_get_the_exact_heads(models, how):
    stock, model = models
    before = count(model)
    expected, found = generated(stock, tokens=6, **how), generated(model, tokens=6, **how)
    assert found[:2] == expected[:2]
    if expected[2] is not None:
        assert all(torch.equal(*pair) for pair in zip(found[2], expected[2], strict=True))
    assert count(model) == before


@pytest.mark.slow("each family is loaded three times in two dtypes")
@pytest.mark.parametrize("family", rest_is_long(["qwen3", "gemma3_text"], ["gemma3_text"]))
def test_other_families_have_it_in_both_dtypes(family, tmp_path):
    save_family(family, tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        stock, model = headed(tmp_path, dtype)
        for how in ({"do_sample": False}, TOP_K):
            assert generated(model, tokens=8, **how) == generated(stock, tokens=8, **how)
        assert count(model)[0] > 0


@pytest.mark.parametrize("family", ["gemma2", "cohere2", "granite"])  # they cap, multiply and divide them
def test_a_family_that_changes_its_logits_keeps_the_exact_head(family, tmp_path):
    save_family(family, tmp_path)
    stock, model = headed(tmp_path)
    assert generated(model, tokens=4, do_sample=False) == generated(stock, tokens=4, do_sample=False)
    assert "changes its logits" in str(model.head_facts)
    assert count(model) == (0, 0)


@pytest.mark.long
def test_guesses_that_travel_ahead_change_nothing(swarm):
    ways = ({"do_sample": False}, TOP_K)
    with swarm.client() as exact:
        expected = [generated(exact, **how) for how in ways]
    for how, plain in zip(ways, expected, strict=True):
        with swarm.client(head="auto", drafting=knowing(plain[0][0])) as model, late(model, 0.02):
            assert generated(model, **how) == plain
            assert model.last_speculation.right > 0
            assert count(model)[0] > 0


# Everything else that looks at logits


def test_a_hand_written_loop_gets_exact_logits(models):
    stock, model = models
    generated(model, tokens=2, do_sample=False)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, stock(IDS).logits)


def test_streamers_and_stopping_criteria_may_call_the_model(models):
    stock, model = models
    seen = []

    def looks(*_):
        with torch.no_grad():
            seen.append(torch.equal(model(IDS, use_cache=False).logits, stock(IDS, use_cache=False).logits))

    class Looking(BaseStreamer):
        put = staticmethod(looks)

        def end(self):
            looks()

    def never(ids, scores, **_):
        looks()
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    before = count(model)
    how = {"do_sample": False, "streamer": Looking(), "stopping_criteria": StoppingCriteriaList([never])}
    assert generated(model, tokens=5, **how) == generated(stock, tokens=5, do_sample=False)
    assert len(seen) == 12
    assert all(seen)
    assert sum(count(model)) - sum(before) == 5


def test_hooks_that_look_at_logits_get_the_exact_heads(models):
    _, model = models
    for module, of in ((model, lambda output: output.logits), (model.lm_head, lambda output: output)):
        seen, before = [], count(model)
        hook = module.register_forward_hook(lambda *call, of=of, seen=seen: seen.append(of(call[-1])))
        generated(model, tokens=3, do_sample=False)
        hook.remove()
        assert all(bool(logits.isfinite().all()) for logits in seen)
        assert (len(seen), count(model)) == (3, before)


def test_a_processor_of_the_callers_own_gets_exact_logits(models):
    class Own(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.flip(-1)

    stock, model = models
    how = {"do_sample": False, "logits_processor": LogitsProcessorList([Own()])}
    assert generated(model, tokens=4, **how) == generated(stock, tokens=4, **how)
    warm = {"do_sample": True, "top_k": 0, "logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)])}
    before = count(model)
    assert generated(model, tokens=4, **warm) == generated(stock, tokens=4, **warm)
    assert count(model)[0] > before[0]


def test_several_rows_take_the_exact_head(models):
    stock, model = models
    before, ids = count(model), torch.cat([IDS, IDS.flip(1)])
    assert generated(model, ids, tokens=3, do_sample=False) == generated(stock, ids, tokens=3, do_sample=False)
    assert count(model) == before


# Where bounds do not hold any more


def test_a_head_that_is_changed_becomes_exact(checkpoint):
    stock, model = headed(checkpoint)
    before = count(model)
    with torch.no_grad():
        for each in (stock, model):
            each.lm_head.weight.copy_(each.lm_head.weight.flip(0))
    assert generated(model, tokens=4, do_sample=False) == generated(stock, tokens=4, do_sample=False)
    for each in (stock, model):
        torch.manual_seed(2)
        each.resize_token_embeddings(140)
    assert generated(model, tokens=4, do_sample=False) == generated(stock, tokens=4, do_sample=False)
    assert count(model) == before


def test_fewer_bits_that_torch_is_allowed_leave_the_choice_to_it(models):
    stock, model = models
    before = count(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert generated(model, tokens=3, do_sample=False) == generated(stock, tokens=3, do_sample=False)
    torch.set_float32_matmul_precision("medium")
    try:
        generated(model, tokens=3, do_sample=False)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert count(model) == before


def test_what_the_head_takes_is_said(models, checkpoint):
    facts = models[1].head_facts
    assert facts.why_exact is None
    assert facts.n_bytes == 128 * 64 * 4
    assert facts.int8_bytes == 128 * (64 + 4 + 8)
    assert "tokens by int8" in str(facts)
    with pytest.raises(BadConfiguration, match="head"):
        AutoDistributedModel.from_pretrained(checkpoint, head="int4")
