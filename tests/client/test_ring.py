"""How long a token takes around a route: the client's own measurement."""

from swarm.client.session.ring import Ring, RingLimits, Use
from swarm.client.session.standing import Layout

LIMITS = RingLimits(steps_min=3, steps_kept=5)


def after(*took_s, ring=None, layout=None):
    ring, layout = ring or Ring(LIMITS), layout or Layout()
    for each in took_s:
        ring.note(layout, each)
    return ring


def test_the_median_of_enough_steps_counts():
    assert after(0.1, 9.0, 0.2).use == Use((), 200.0)


def test_few_steps_show_nothing():
    assert after(0.1, 0.1).use is None


def test_the_latest_steps_count():
    assert after(*[9.0] * 5, *[0.1] * 3).use == Use((), 100.0)


def test_steps_on_another_route_are_forgotten():
    first, second = Layout(), Layout(epoch=1)
    ring = after(0.1, 0.1, 0.1, layout=first)
    assert after(9.0, 9.0, ring=ring, layout=second).use is None
    assert after(9.0, ring=ring, layout=second).use == Use((), 9000.0)
