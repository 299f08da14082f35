"""Other files under a model's name: servers that answer lead to a warning, records of nobody to nothing."""

from collections.abc import Iterator

import pytest

from swarm.errors import Unreachable
from swarm.identity import Identity
from swarm.net.dialer import Dialer
from swarm.net.endpoint import Endpoint
from swarm.net.noise import ChannelKey
from swarm.server.namesakes import NamesakeLimits, Namesakes
from tests.model.rings import save_family
from tests.support.inprocess import NETWORK, InProcessSwarm, inprocess

NOBODYS = "66" * 32


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessSwarm]:
    with inprocess(save_family("llama", tmp_path_factory.mktemp("swarm") / "tiny"), "0:6") as swarm:
        yield swarm


def namesakes(swarm: InProcessSwarm, root: str, limits: NamesakeLimits) -> tuple[str, ...]:
    """Return the roots that a server of this root would be warned of."""

    class Ours:
        public_name = swarm.checkpoint.public_name

    Ours.root = root

    async def look() -> tuple[str, ...]:
        dialer = Dialer(Endpoint(Identity.generate(), ChannelKey(), NETWORK), lambda *_: None)
        try:
            return await Namesakes(swarm.directory(), Ours, dialer, limits).answering()
        finally:
            await dialer.close()

    return swarm.loop.run(look())


def announce_nobody(swarm: InProcessSwarm) -> None:
    """Announce, as a stranger, another root under the model's name, at an address where nobody is."""
    stranger = Identity.generate()
    record = swarm.servers[0].announcement("online")
    lie = {"root": NOBODYS, "public_key": stranger.public_key.hex(), "addresses": ("127.0.0.1:9",)}
    swarm.loop.run(swarm.directory(stranger).announce(record.model_copy(update=lie)))


def test_a_record_of_nobody_is_no_namesake(swarm: InProcessSwarm) -> None:
    announce_nobody(swarm)
    assert NOBODYS in {entry.root for entry in swarm.loop.run(swarm.directory().models())}
    assert namesakes(swarm, swarm.checkpoint.root, NamesakeLimits()) == ()


def test_a_server_that_answers_with_other_files_is_a_namesake(swarm: InProcessSwarm) -> None:
    announce_nobody(swarm)
    assert namesakes(swarm, "11" * 32, NamesakeLimits()) == (swarm.checkpoint.root,)


def test_no_more_roots_are_looked_at_than_the_limit(swarm: InProcessSwarm) -> None:
    assert namesakes(swarm, "11" * 32, NamesakeLimits(roots_max=0)) == ()


async def test_a_directory_that_cannot_be_read_warns_of_nothing(swarm: InProcessSwarm) -> None:
    class Away:
        async def models(self, _: str) -> None:
            raise Unreachable("a node", (), 0.0)

    dialer = Dialer(Endpoint(Identity.generate(), ChannelKey(), NETWORK), lambda *_: None)
    await Namesakes(Away(), swarm.checkpoint, dialer).warn()
