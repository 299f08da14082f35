"""How a long step is cut into parts that are under way together."""

import pytest
import torch

from swarm.activations import Activations
from swarm.client.session.chunks import cut
from swarm.client.session.limits import ChunkLimits

WIDTH = 16
LIMITS = ChunkLimits()


def parts(tokens, rows=1, limits=LIMITS, **options):
    hidden = torch.arange(rows * tokens, dtype=torch.float32).reshape(rows, tokens, 1).expand(-1, -1, WIDTH)
    chunks = list(cut(Activations(hidden), keep=3, rows=None, want=1, limits=limits, **options))
    assert torch.equal(torch.cat([chunk.activations.hidden for chunk in chunks], dim=1), hidden)
    starts = [chunk.keep for chunk in chunks]
    assert starts == [3 + sum(chunk.activations.tokens for chunk in chunks[:i]) for i in range(len(chunks))]
    assert [chunk.want for chunk in chunks] == [0] * (len(chunks) - 1) + [1]
    return [chunk.activations.tokens for chunk in chunks]


def test_a_short_step_is_one_part():
    assert parts(40, tokens_per_s=1e6) == [40]


def test_a_part_keeps_the_slowest_hop_busy_for_a_moment():
    size = int(LIMITS.chunk_s * 2000)
    assert parts(3 * size, tokens_per_s=2000) == [size, size, size]


@pytest.mark.parametrize(("rows", "size"), [(1, LIMITS.chunk_tokens_min), (4, LIMITS.chunk_tokens_min // 4)])
def test_slow_hops_get_parts_worth_reading_the_weights_for(rows, size):
    assert parts(2 * size, rows, tokens_per_s=1.0) == [size, size]


def test_fast_hops_get_no_more_than_a_message_may_have():
    limits = ChunkLimits(chunk_bytes=100 * WIDTH * 4)
    assert parts(200, limits=limits, tokens_per_s=1e6) == [100, 100]
    assert parts(200, limits=limits) == [100, 100]


def test_parts_are_even():
    limits = ChunkLimits(chunk_bytes=100 * WIDTH * 4)
    assert parts(250, limits=limits) == [84, 84, 82]
    assert parts(101, limits=limits) == [51, 50]
