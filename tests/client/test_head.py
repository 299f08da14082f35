"""A head in 8 bits: tokens and random numbers are those of the exact head."""

import pytest
import torch
from transformers import AutoModelForCausalLM, StoppingCriteriaList

from tests.families import make
from tests.model.rings import save_family
from tests.support.inprocess import inprocess

IDS = torch.randint(3, 120, (1, 12), generator=torch.Generator().manual_seed(5))
WAYS = {
    "greedy": {"do_sample": False},
    "greedy, with a penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "greedy, not these": {"do_sample": False, "suppress_tokens": [5, 9], "min_new_tokens": 20},
    "seeded": {"do_sample": True, "top_k": 0},
    "seeded, warm": {"do_sample": True, "top_k": 0, "temperature": 0.7, "repetition_penalty": 1.1},
    "seeded, top-k": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "seeded, top-k, top-p": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.9},
}


def generated(model, ids=IDS, tokens=24, **how):
    """Return the tokens, and the state of the random numbers."""
    torch.manual_seed(7)
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, eos_token_id=[1], pad_token_id=0, **how
    )
    return found.tolist(), torch.get_rng_state().tolist()


@pytest.fixture(scope="module")
def models(swarm):
    with swarm.client() as exact, swarm.client(head="auto") as auto:
        yield exact, auto


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_tokens_and_random_numbers_are_the_exact_heads(models, how):
    exact, auto = models
    before = auto.head_facts
    assert generated(auto, **how) == generated(exact, **how)
    after = auto.head_facts
    assert after.proven > before.proven, str(after)
