"""The draft that the demo's checkpoint ships: it fits, it is small, and it is right on code that it has not seen."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm.client.hf.drafting import drafting_by_head
from swarm.demo.cli import CHECKPOINT
from swarm.model.loading import load_ends
from tests.client.test_ahead import late
from tests.support.inprocess import inprocess
from tests.support.often import rest_is_long

DRAFT = CHECKPOINT.parent / "draft"
UNSEEN = (
    'def merge_intervals(pairs):\n    """Join intervals that overlap, in order of their starts."""\n    merged = []\n',
    "class TokenBucket:\n    def __init__(self, rate, burst):\n        self.rate = rate\n        self.burst = burst\n",
    "def parse_duration(text):\n    units = {'s': 1, 'm': 60, 'h': 3600}\n    if not text:\n        raise ValueError(",
    "def _retry(call, attempts):\n    for attempt in range(attempts):\n        try:\n            return call()\n",
)


@pytest.fixture(scope="module")
def demo():
    with inprocess(CHECKPOINT, "0:4", "4:8", "8:12") as swarm:
        yield swarm


def test_it_is_at_most_a_megabyte_and_a_half():
    assert sum(path.stat().st_size for path in DRAFT.iterdir()) <= 1_500_000


@pytest.mark.long
@pytest.mark.parametrize("count", rest_is_long([2, 4], [2]))
def test_it_is_right_in_most_guesses_on_unseen_code(demo, count):
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    full = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    drafting = drafting_by_head(DRAFT, demo.checkpoint, load_ends(demo.checkpoint, dtype=torch.float32))
    drafting = replace(drafting, always=True)  # also where the machine is so busy that guesses lose
    right = compared = tokens = trips = 0
    with demo.client(drafting=drafting) as model, late(model, 0.04):
        for prompt in UNSEEN[:count]:
            inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
            how = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
            assert model.generate(**inputs, **how).tolist() == full.generate(**inputs, **how).tolist()
            counts = model.last_speculation
            right, compared = right + counts.right, compared + counts.right + counts.wrong
            tokens, trips = tokens + counts.tokens, trips + counts.trips
    assert compared > 20
    assert right / compared >= 0.6
    assert tokens / trips > 1.3
