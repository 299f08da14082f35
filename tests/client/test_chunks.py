"""How a long step is cut into parts that are under way together."""

import pytest
import torch

from swarm.activations import Activations
from swarm.client.session.chunks import CHUNK_S, CHUNK_TOKENS_MIN, cut

WIDTH = 16


def parts(tokens, rows=1, **options):
    hidden = torch.arange(rows * tokens, dtype=torch.float32).reshape(rows, tokens, 1).expand(-1, -1, WIDTH)
    chunks = list(cut(Activations(hidden), keep=3, rows=None, want=1, **options))
    assert torch.equal(torch.cat([chunk.hidden for chunk in chunks], dim=1), hidden)
    starts = [chunk.keep for chunk in chunks]
    assert starts == [3 + sum(chunk.hidden.shape[1] for chunk in chunks[:i]) for i in range(len(chunks))]
    assert [chunk.want for chunk in chunks] == [0] * (len(chunks) - 1) + [1]
    return [chunk.hidden.shape[1] for chunk in chunks]


def test_a_short_step_is_one_part():
    assert parts(40, tokens_per_s=1e6) == [40]


def test_a_part_keeps_the_slowest_hop_busy_for_a_moment():
    size = int(CHUNK_S * 2000)
    assert parts(3 * size, tokens_per_s=2000) == [size, size, size]


@pytest.mark.parametrize(("rows", "size"), [(1, CHUNK_TOKENS_MIN), (4, CHUNK_TOKENS_MIN // 4)])
def test_slow_hops_get_parts_that_are_worth_reading_the_weights_for(rows, size):
    assert parts(2 * size, rows, tokens_per_s=1.0) == [size, size]


def test_fast_hops_get_no_more_than_a_message_may_have(monkeypatch):
    monkeypatch.setattr("swarm.client.session.chunks.CHUNK_BYTES", 100 * WIDTH * 4)
    assert parts(200, tokens_per_s=1e6) == [100, 100]
    assert parts(200) == [100, 100]


def test_parts_are_even(monkeypatch):
    monkeypatch.setattr("swarm.client.session.chunks.CHUNK_BYTES", 100 * WIDTH * 4)
    assert parts(250) == [84, 84, 82]
    assert parts(101) == [51, 50]
