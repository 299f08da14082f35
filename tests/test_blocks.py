"""Block ranges: which blocks nobody holds."""

from hypothesis import given
from hypothesis import strategies as st

from swarm.blocks import Blocks, missing_blocks

RANGES = (
    st.tuples(st.integers(0, 11), st.integers(1, 12)).filter(lambda ends: ends[0] < ends[1]).map(lambda e: Blocks(*e))
)


@given(RANGES, st.lists(RANGES, max_size=6))
def test_a_block_is_missing_where_no_range_has_it(wanted, held):
    assert missing_blocks(wanted, held) == tuple(n for n in wanted if not any(n in blocks for blocks in held))
