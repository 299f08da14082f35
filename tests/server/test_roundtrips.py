"""Servers measure round trips to those who may come before or after them."""

import asyncio
import time
from random import Random

import pytest

from swarm.blocks import Blocks
from swarm.dht.records import RECORD, Rtt, SignedAnnouncement, sign_announcement
from swarm.errors import Unreachable
from swarm.identity import Identity
from swarm.server.roundtrips import RoundTripLimits, RoundTrips, choose_peers
from tests.client.test_route import planned
from tests.dht.support import announcement

ME = Identity(b"m" * 32)


def peer(start, stop, number=0, **more):
    identity = Identity(bytes([start, stop, number]) + b"p" * 29)
    fields = {"n_blocks": 32, "blocks": (start, stop), "state": "online", **more}
    return SignedAnnouncement(announcement(identity, **fields), b"")


def mine(start=8, stop=12):
    return announcement(ME, n_blocks=32, blocks=(start, stop), state="online")


def chosen(servers, measured=None, silent=(), me=None):
    return [s.announcement for s in choose_peers(servers, me or mine(), measured or {}, silent, Random(0))]


def spans(servers):
    return sorted(tuple(a.blocks) for a in servers)


def test_neighbours_of_both_sides_are_chosen_and_nobody_else():
    away, same = peer(0, 4), peer(8, 12)
    servers = [away, same, peer(4, 8), peer(6, 10), peer(12, 16), peer(10, 14), peer(13, 16)]
    assert spans(chosen(servers)) == [(4, 8), (6, 10), (10, 14), (12, 16)]


def test_who_cannot_be_in_one_route_with_us_is_not_measured():
    servers = [
        peer(12, 16, numeric_class="bfloat16+nf4"),
        peer(12, 16, 1, state="draining"),
        SignedAnnouncement(mine(12, 16), b""),
        peer(12, 16, 2, numeric_class="bfloat16+int8"),
    ]
    assert [a.public_key for a in chosen(servers)] == [servers[3].announcement.public_key]


def test_of_many_those_are_chosen_that_begin_or_end_where_this_span_does():
    exact = [peer(12, 16, n) for n in range(20)] + [peer(4, 8, n) for n in range(20)]
    holding = [peer(10, 14, n) for n in range(20)]
    assert spans(chosen(holding + exact)) == [(4, 8)] * (RECORD.rtts_max // 2) + [(12, 16)] * (RECORD.rtts_max // 2)
    assert spans(chosen(exact[:3] + holding)) == [(10, 14)] * (RECORD.rtts_max - 3) + [(12, 16)] * 3


def test_the_nearest_are_measured_again_and_others_get_their_turn():
    servers = [peer(12, 16, n) for n in range(60)]
    measured = {s.announcement.public_key: float(n) for n, s in enumerate(servers[:30])}
    again = [measured.get(a.public_key) for a in chosen(servers, measured)]
    kept = sorted(ms for ms in again if ms is not None)
    assert kept == list(map(float, range(len(kept))))
    assert 0 < len(kept) < RECORD.rtts_max == len(again)


def test_who_did_not_answer_is_left_alone():
    servers = [peer(12, 16, n) for n in range(3)]
    assert len(chosen(servers, silent={servers[0].announcement.public_key})) == 2


class FakeDialer:
    """Channels that answer after so long; None: nobody is there."""

    def __init__(self, answers_s):
        self.answers_s = answers_s
        self.held = self.most = 0
        self.dialled = []

    async def connect(self, remote, addresses):
        del addresses
        self.dialled.append(remote.peer)
        self.held += 1
        self.most = max(self.most, self.held)
        await asyncio.sleep(0.001)
        if self.answers_s[remote.peer] is None:
            self.held -= 1
            raise Unreachable(remote.peer, (), 0.0)
        return FakeChannel(self.answers_s[remote.peer])

    def release(self, channel):
        del channel
        self.held -= 1


class FakeChannel:
    def __init__(self, answers_s):
        self._answers_s = iter(answers_s)

    async def ping(self):
        answer = next(self._answers_s)
        if answer is None:
            await asyncio.get_running_loop().create_future()
        return answer


async def test_what_was_measured_can_be_announced_and_planned_with():
    near, stuck, gone = (peer(12, 16, n) for n in range(3))
    dialer = FakeDialer(
        {
            near.announcement.peer_id: [0.9, 0.0123, 0.4],
            stuck.announcement.peer_id: [0.1, None],
            gone.announcement.peer_id: None,
        }
    )
    trips = RoundTrips(dialer, Random(0), RoundTripLimits(peer_timeout_s=0.05))
    await trips.measure([near, stuck, gone], mine())
    assert trips.latest == (Rtt(near.announcement.public_key[:16], 12.3),)
    assert dialer.held == 0
    me = mine().model_copy(update={"rtts": trips.latest})
    agrees = near.announcement.model_copy(update={"rtts": (Rtt(me.public_key[:16], 12.0),)})
    route = planned(Blocks(8, 16), [SignedAnnouncement(me, b""), SignedAnnouncement(agrees, b"")])
    assert route.estimates[1].trip_ms == pytest.approx(12.3 / 2)
    dialer.dialled.clear()
    dialer.answers_s[near.announcement.peer_id] = [0.01] * 3
    await trips.measure([near, stuck, gone], mine())
    assert dialer.dialled == [near.announcement.peer_id]


async def test_few_peers_are_measured_at_a_time():
    servers = [peer(12, 16, n) for n in range(RECORD.rtts_max)]
    dialer = FakeDialer({s.announcement.peer_id: [0.01] * 3 for s in servers})
    trips = RoundTrips(dialer, Random(0))
    await trips.measure(servers, mine())
    assert len(trips.latest) == RECORD.rtts_max
    assert dialer.most == RoundTripLimits().at_once_max


def test_a_record_with_all_round_trips_and_four_long_addresses_fits():
    rtts = tuple(Rtt(f"{n:016x}", 999999.9) for n in range(RECORD.rtts_max))
    addresses = tuple(f"{'a' * 60}.{'b' * 55}{n}.org:65535" for n in range(4))
    now = time.time()
    record = announcement(ME, rtts=rtts, addresses=addresses, public_name="n" * 64, model="m" * 128)
    assert (
        len(sign_announcement(record.model_copy(update={"issued": now, "expires": now + 60}), ME)) <= RECORD.bytes_max
    )


@pytest.mark.virtual_clock
@pytest.mark.parametrize(("count", "reads"), [(3, 10), (200, 1)])
async def test_large_swarms_directory_is_read_rarely_and_with_one_salt(count, reads):
    salts = []

    class Counting:
        async def servers(self, root, n_blocks, salt):
            salts.append(salt)
            return [peer(12, 16, 0)] * count

    trips = RoundTrips(FakeDialer({peer(12, 16, 0).announcement.peer_id: None}), Random(0))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(599.0):
            await trips.run(Counting(), mine())
    assert len(salts) == reads
    assert len(set(salts)) == 1
