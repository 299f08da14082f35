"""What one peer may hold of a pool."""

from swarm.server.pool import Pool


def held(pool, peer):
    """Take all that a peer gets."""
    lease = pool.lease(peer)
    assert not lease.resize(pool.free(peer) + 1)
    assert lease.amount == 0
    assert lease.resize(pool.free(peer))
    return lease.amount


def test_a_peer_that_is_alone_gets_eight_ninths_of_the_pool():
    assert held(Pool(900), "a") == 800


def test_the_next_peer_gets_eight_ninths_of_the_rest():
    pool = Pool(8100)
    assert [held(pool, "a"), held(pool, "b"), held(pool, "c")] == [7200, 800, 88]


def test_a_peers_second_session_gets_no_share_of_its_own():
    pool = Pool(900)
    held(pool, "a")
    assert pool.free("a") == 0
    assert pool.free() > 0
