"""A libp2p port is tried from outside: the peer that listens there proves who it is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from swarm.dht.dialback import Request, ask_dial_back
from swarm.dht.helper import Helper, serve_dial_back
from swarm.dht.probe import peer_at
from swarm.errors import HandshakeFailed
from swarm.identity import Identity
from swarm.net.address import Tcp
from swarm.net.endpoint import Endpoint
from swarm.net.noise import ChannelKey
from swarm.net.p2p import port_of
from tests.dht.support import NETWORK, node
from tests.dht.test_dialback import Dialler

ME = Endpoint(Identity(b"b" * 32), ChannelKey(), NETWORK)
HELLO = b"\x13/multistream/1.0.0\n\x07/noise\n"


@asynccontextmanager
async def saying(words: bytes) -> AsyncIterator[Tcp]:
    """A listener that says the same to all, whatever they say."""

    def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        writer.close()

    listener = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with listener:
        yield Tcp("127.0.0.1", listener.sockets[0].getsockname()[1])


async def test_a_listener_proves_its_peer_id(tmp_path: Path) -> None:
    async with node(tmp_path, "boot") as boot:
        assert await peer_at(Tcp("127.0.0.1", port_of(boot.addresses[0]))) == boot.peer_id


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2p1 Debian",
        b"\x13/multistream/1.0.0\n\x03na\n" + bytes(40),
        HELLO,
        HELLO + b"\xff\xff",
        HELLO + b"\x00\x00",
        HELLO + b"\x00\xca" + bytes(202),
    ],
)
async def test_what_is_no_libp2p_node_proves_nothing(words: bytes) -> None:
    async with saying(words) as at:
        with pytest.raises((HandshakeFailed, ConnectionError)):
            await asyncio.wait_for(peer_at(at), 5)


async def test_a_neighbours_forwarded_port_is_not_the_askers(tmp_path: Path) -> None:
    async with node(tmp_path, "boot") as boot, node(tmp_path, "alice", boot.addresses) as alice:
        await serve_dial_back(boot, ME, Dialler())
        assert (await ask_dial_back(alice, None, p2p_port=port_of(alice.addresses[0]))).p2p
        assert not (await ask_dial_back(alice, None, p2p_port=port_of(boot.addresses[0]))).p2p


@pytest.mark.parametrize(("named", "found"), [("", False), ("127.0.0.1", True), ("127.0.0.3", False)])
async def test_a_port_is_tried_at_the_host_that_the_asker_names(tmp_path: Path, named: str, found: bool) -> None:
    async with node(tmp_path, "alice") as alice:
        helper = Helper(alice, ME, Dialler())
        request = Request(p2p_port=port_of(alice.addresses[0]), p2p_host=named)
        sealed = alice.gate.seal.close(request.model_dump_json().encode())
        comes_from = "/ip4/127.0.0.2/tcp/1"  # where alice does not listen
        answer = await helper._answer(alice.peer_id, comes_from, sealed, Request.model_validate_json)
        assert answer.p2p == found


@pytest.mark.parametrize("host", ["example.org", "127.0.0.1:22", "1.2.3", "::1%lo" * 10])
def test_an_asker_names_a_literal_address(host: str) -> None:
    with pytest.raises(ValueError, match="p2p_host"):
        Request(p2p_host=host)
