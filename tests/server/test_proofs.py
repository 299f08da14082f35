"""Who has proven to be there: real handshakes, and addresses at which nobody is."""

from random import Random

import pytest

from swarm.dht.records import Announcement
from swarm.identity import Identity
from swarm.net.dialer import Dialer
from swarm.net.endpoint import Endpoint
from swarm.net.noise import ChannelKey
from swarm.server.proofs import ProofLimits, Proofs
from tests.model.rings import save_family
from tests.support.inprocess import NETWORK, inprocess


@pytest.fixture(scope="module")
def swarm(tmp_path_factory):
    with inprocess(save_family("llama", tmp_path_factory.mktemp("swarm") / "tiny"), "0:3", "3:6") as swarm:
        yield swarm


def looked(swarm, *looks: list[Announcement], limits: ProofLimits | None = None):
    """What one server knows after each look."""

    async def look():
        dialer = Dialer(Endpoint(Identity.generate(), ChannelKey(), NETWORK), lambda *_: None)
        proofs = Proofs(dialer, Random(1), limits or ProofLimits())
        try:
            return [dict(await proofs.look(servers)) for servers in looks]
        finally:
            await dialer.close()

    return swarm.loop.run(look())


def records(swarm):
    """The announcements of both servers, of one whose address nobody has, and of one that lies about its address."""
    first, second = (server.announcement("online") for server in swarm.servers)
    nobody = {"public_key": Identity.generate().public_key.hex(), "addresses": ("127.0.0.1:9",)}
    borrowed = {"public_key": Identity.generate().public_key.hex()}  # of the first server's address
    return first, second, first.model_copy(update=nobody), first.model_copy(update=borrowed)


def test_servers_prove_that_they_are_there_and_others_are_silent(swarm):
    servers = records(swarm)
    (known,) = looked(swarm, servers)
    assert [known[server.public_key] for server in servers] == [True, True, False, False]


def test_nobody_is_called_again_while_the_answer_counts(swarm):
    first, _, nobody, _ = records(swarm)
    away = first.model_copy(update={"addresses": ("127.0.0.1:9",)})
    there = nobody.model_copy(update={"public_key": nobody.public_key, "addresses": first.addresses})
    before, after = looked(swarm, [first, nobody], [away, there])
    assert before == after == {first.public_key: True, nobody.public_key: False}


def test_a_silent_server_is_called_again_after_a_while(swarm):
    first, *_ = records(swarm)
    away = first.model_copy(update={"addresses": ("127.0.0.1:9",)})
    before, after = looked(swarm, [away], [first], limits=ProofLimits(silent_s=0.0))
    assert (before, after) == ({first.public_key: False}, {first.public_key: True})


def test_a_look_is_bounded(swarm):
    (known,) = looked(swarm, records(swarm), limits=ProofLimits(calls_max=2))
    assert len(known) == 2


def test_who_joins_for_ever_is_silent(swarm):
    joining = records(swarm)[0].model_copy(update={"state": "joining", "addresses": ()})
    assert looked(swarm, [joining]) == [{}]
    assert looked(swarm, [joining], [joining], limits=ProofLimits(joining_s=-1.0))[-1] == {joining.public_key: False}
