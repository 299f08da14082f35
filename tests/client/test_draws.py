"""What a draft takes where the caller draws, and how sure it is of that."""

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from swarm.client.hf.draws import Draws

TOKENS, TEXTS = 50, 1000


def test_a_draft_takes_what_the_caller_draws_and_is_sure_where_it_is_right():
    generator, draws = torch.Generator().manual_seed(1), Draws()
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.8)])
    sure, unsure, unlikely = [], [], []
    torch.manual_seed(2)
    for position in range(1, TEXTS):
        logits = 3 * torch.randn(TOKENS, generator=generator)
        draft = logits + 0.5 * torch.randn(TOKENS, generator=generator)
        draws.at(position, processors)
        token, share = draws.choose([0] * position, draft)
        drawn = int(torch.multinomial(torch.softmax(logits / 0.8, -1), 1))
        (sure if share > 0.8 else unsure).append(token == drawn)
        if share > 0.8 and torch.softmax(draft / 0.8, -1)[token] < 0.6:
            unlikely.append(token == drawn)
    assert len(sure) > 0.2 * TEXTS
    assert sum(unlikely) > 0.95 * len(unlikely) > 20  # tokens that win the race by far, though they are not likely
    assert sum(sure) > 0.95 * len(sure)
    assert sum(unsure) < 0.8 * len(unsure)


def test_without_draws_the_likeliest_token_is_taken_and_its_probability_is_its_share():
    logits = torch.tensor([0.0, 2.0, 1.0])
    assert Draws().choose([0], logits) == (1, pytest.approx(float(torch.softmax(logits, -1)[1])))
