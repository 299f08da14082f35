"""Token buckets and the fair queue, by times that are passed in."""

import pytest

from swarm.net.rate import FairQueue, TokenBucket


def test_a_bucket_gives_its_burst_and_then_its_rate():
    bucket = TokenBucket(10.0, 5.0)
    assert [bucket.take(1.0) for _ in range(5)] == [0.0] * 5
    assert 0 < bucket.take(1.0) <= 0.1
    taken = sum(bucket.take(1.0 + i / 1000) == 0.0 for i in range(1, 2001))
    assert 19 <= taken <= 21


def test_a_bucket_lends_a_large_amount_and_waits_for_it():
    bucket = TokenBucket(10.0, 5.0)
    assert bucket.take(1.0, 25.0) == 0.0
    assert bucket.take(1.0) == pytest.approx(2.0, abs=0.01)
    assert bucket.take(3.1) == 0.0


def test_debts_add_up_and_are_paid():
    bucket = TokenBucket(10.0, 5.0)
    assert bucket.owe(0.0, 5.0) == 0.0
    assert [bucket.owe(0.0, 5.0) for _ in range(3)] == [0.5, 1.0, 1.5]
    assert not bucket.is_full(1.5)
    assert bucket.is_full(2.1)


def test_tokens_that_are_given_back_do_not_exceed_the_burst():
    bucket = TokenBucket(1.0, 5.0)
    bucket.take(0.0, 6.0)
    bucket.give(3.0)
    assert bucket.take(0.0) == 0.0
    bucket.give(100.0)
    assert [bucket.take(0.0) for _ in range(6)] == [0.0] * 5 + [pytest.approx(0.0, abs=0.01)]
    bucket.change(100.0)
    assert bucket.take(0.05) == 0.0


def settled(queue, times):
    """Payers, and when they were paid."""
    return [(payer, now) for now in times if (payer := queue.settle(now)) is not None]


def test_a_queue_pays_in_turn_and_forgets_payers_that_leave():
    queue = FairQueue(10.0, 10.0)
    assert queue.pay("first", 20.0, 0.0)  # so much is there at first, and lent
    assert not any(queue.pay(payer, 10.0, 0.0) for payer in ("second", "leaves", "first"))
    assert not queue.pay("leaves", 1000.0, 0.0)
    assert queue.next_s(0.0) == 1.0
    assert settled(queue, [0.5, 0.9, 1.1]) == [("second", 1.1)]
    queue.leave("leaves")
    assert not queue.pay("last", 10.0, 1.5)
    assert queue.wait_s(1.5) < 1.0
    assert settled(queue, [1.5 + i / 10 for i in range(100)]) == [("first", 2.1), ("last", pytest.approx(3.1))]
    assert queue.next_s(12.0) is None
    assert queue.pay("last", 1.0, 12.0)


def test_a_queue_lets_no_payer_pass_the_others():
    queue = FairQueue(10.0, 10.0)
    queue.pay("first", 20.0, 0.0)
    queue.pay("second", 1.0, 0.0)
    assert not queue.pay("third", 1.0, 5.0)  # there are tokens, and the second is first
    assert queue.settle(5.0) == "second"
