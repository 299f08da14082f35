"""The shelf finds whole beginnings of chains, stays within its bound, and drops the right blocks."""

from hypothesis import given
from hypothesis import strategies as st

from swarm.server.shelf import Shelf

TOKENS = 3
OWNERS = ("ada", "bob", "cleo")
CHAINS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def keys(chain):
    """The keys of a chain: each stands for all before it."""
    return [tuple(chain[: i + 1]) for i in range(len(chain))]


def put(shelf, owner, chain, now=0.0):
    every = keys(chain)
    shelf.put(owner, every, {i: every[i] for i in shelf.missing(owner, every)}, TOKENS, now)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(OWNERS), CHAINS),
        st.tuples(st.just("find"), st.sampled_from(OWNERS), CHAINS),
        st.tuples(st.just("trim"), st.integers(0, 60)),
        st.tuples(st.just("forget"), st.integers(0, 40)),
    ),
    max_size=40,
)


@given(operations=OPERATIONS)
def test_every_block_that_is_kept_can_be_found(operations):
    """A twin that keeps nothing but sets of keys: what is there is always whole chains."""
    shelf, everything = Shelf(), {tuple(k) for a in range(3) for k in [(a,)]}
    for now, (what, *arguments) in enumerate(operations):
        match what:
            case "put":
                put(shelf, *arguments, now)
            case "find":
                owner, chain = arguments
                found = shelf.find(owner, keys(chain), now)
                assert list(found) == keys(chain)[: len(found)]
            case "trim":
                shelf.trim(arguments[0])
                assert shelf.tokens <= arguments[0]
            case "forget":
                shelf.forget(now - arguments[0])
        everything |= {tuple(key) for key in keys(arguments[1])} if what in {"put", "find"} else set()
        kept = {
            owner: {key for key in everything if not shelf.missing(owner, [key])} for owner in OWNERS
        }  # of all chains that were ever named
        for blocks in kept.values():
            assert all(key[:-1] in blocks for key in blocks if len(key) > 1)
        assert shelf.tokens == sum(TOKENS * len(blocks) for blocks in kept.values())
        assert [shelf.tokens_of(owner) for owner in OWNERS] == [TOKENS * len(kept[owner]) for owner in OWNERS]


def test_a_block_is_no_ones_but_its_owners():
    shelf = Shelf()
    put(shelf, "ada", (1, 2))
    assert shelf.find("ada", keys((1, 2)), 0.0) == ((1,), (1, 2))
    assert shelf.find("bob", keys((1, 2)), 0.0) == ()


def test_blocks_behind_a_gap_are_not_kept():
    shelf = Shelf()
    shelf.put("ada", keys((1, 2, 3)), {0: "a", 2: "c"}, TOKENS, 0.0)
    assert shelf.tokens == TOKENS
    shelf.put("bob", keys((1, 2)), {1: "b"}, TOKENS, 0.0)
    assert shelf.tokens == TOKENS


def test_blocks_that_were_used_longest_ago_go_first_and_ends_before_beginnings():
    shelf = Shelf()
    put(shelf, "ada", (1, 1, 1), 1.0)
    put(shelf, "ada", (1, 2, 2), 2.0)
    shelf.find("ada", keys((1, 1)), 3.0)
    order = [keys((1, 1, 1))[2], keys((1, 2, 2))[2], keys((1, 2, 2))[1], keys((1, 1))[1], (1,)]
    for left in range(4, -1, -1):
        shelf.trim(TOKENS * left)
        assert shelf.missing("ada", order) == tuple(range(5 - left))


def test_the_owner_with_most_tokens_loses_its_blocks_first():
    shelf = Shelf()
    put(shelf, "ada", (1,), 1.0)
    for i in range(5):
        put(shelf, "bob", (i,), 2.0)
    shelf.trim(2 * TOKENS)
    assert (shelf.tokens_of("ada"), shelf.tokens_of("bob")) == (TOKENS, TOKENS)


def test_blocks_that_nobody_used_since_then_are_forgotten():
    shelf = Shelf()
    put(shelf, "ada", (1, 1), 1.0)
    put(shelf, "bob", (1, 1), 2.0)
    shelf.find("ada", keys((1,)), 3.0)
    shelf.forget(before=3.0)
    assert (shelf.tokens_of("ada"), shelf.tokens_of("bob")) == (TOKENS, 0)
