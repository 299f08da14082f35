"""Dial-back: nodes on loopback try whether an asker can be reached, and more than half of them must agree."""

import asyncio
from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from swarm.dht.dialback import (
    FORMER,
    PROTOCOL,
    Answer,
    DialBackLimits,
    DialledBack,
    Findings,
    Offer,
    Request,
    ask_dial_back,
    read_message,
    write_message,
)
from swarm.dht.directory import Directory
from swarm.dht.helper import Helper, serve_dial_back
from swarm.dht.node import SwarmNode
from swarm.dht.records import Mooring, SignedAnnouncement
from swarm.dht.sealing import Purpose
from swarm.errors import HandshakeFailed, TooBusy, Unreachable
from swarm.identity import Identity
from swarm.net.address import Address, ViaAnchor
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.noise import ChannelKey
from swarm.net.p2p import host_of, port_of
from tests.dht.support import NETWORK, announcement, node, soon

ALICE, BOB, ANCHOR = Identity(b"a" * 32), Identity(b"b" * 32), Identity(b"c" * 32)
ME = Endpoint(BOB, ChannelKey(), NETWORK)
HERE = "127.0.0.1:4000"
AT = Mooring(ANCHOR.public_key.hex(), "ef" * 32, "127.0.0.1:5000")


def directory(of: SwarmNode, identity: Identity) -> Directory:
    return Directory(of, identity=identity, network=NETWORK, clock=of.gate.clock)


class Dialler:
    """Reaches what it is told can be reached, and remembers what it was asked to dial."""

    def __init__(self, *reachable: str) -> None:
        self.reachable = reachable
        self.dialled: list[tuple[str, Remote]] = []

    async def __call__(self, address: Address, remote: Remote, *_: object) -> Any:
        name = address.peer if isinstance(address, ViaAnchor) else str(address)
        self.dialled.append((name, remote))
        if name not in self.reachable:
            raise HandshakeFailed(name, "another key")
        return SimpleNamespace(close=lambda: None)


async def announced(server: SwarmNode, **changes: Any) -> SignedAnnouncement:
    published = await directory(server, ALICE).announce(announcement(ALICE, **changes))
    return published.signed


async def test_a_helper_dials_the_askers_addresses_and_says_which_answered(tmp_path: Path) -> None:
    dialler = Dialler(HERE)
    async with node(tmp_path, "boot") as boot, node(tmp_path, "alice", boot.addresses, identity=ALICE) as server:
        await serve_dial_back(boot, ME, dialler)
        signed = await announced(server, addresses=(HERE, "127.0.0.1:4001"), state="joining")
        findings = await ask_dial_back(server, signed)
        (found,) = findings.found
        assert (found.helper, found.answer.answered, found.answer.silent) == (
            boot.peer_id,
            (HERE,),
            ("127.0.0.1:4001",),
        )
        assert (findings.reached, findings.seen, findings.through) == (True, "127.0.0.1", False)
        remote = Remote(ALICE.peer_id, bytes.fromhex("cd" * 32))
        assert sorted(dialler.dialled) == [(HERE, remote), ("127.0.0.1:4001", remote)]


async def test_a_helper_goes_through_the_askers_anchors(tmp_path: Path) -> None:
    dialler = Dialler(ANCHOR.peer_id)
    async with node(tmp_path, "boot") as boot, node(tmp_path, "alice", boot.addresses, identity=ALICE) as server:
        await serve_dial_back(boot, ME, dialler)
        findings = await ask_dial_back(server, await announced(server, addresses=(), anchors=(AT,)))
        assert (findings.reached, findings.through) == (False, True)
        assert findings.found[0].answer.through == (AT.public_key,)


async def test_a_helper_tries_ports_only_where_the_asker_comes_from(tmp_path: Path) -> None:
    dialler = Dialler("127.0.0.1:4444")
    async with node(tmp_path, "boot") as boot, node(tmp_path, "alice", boot.addresses, identity=ALICE) as server:
        await serve_dial_back(boot, ME, dialler)
        signed = await announced(server, addresses=())
        p2p_port = port_of(server.addresses[0])
        findings = await ask_dial_back(server, signed, data_port=4444, p2p_port=p2p_port)
        assert (findings.outside, findings.p2p) == ("127.0.0.1", True)

        def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-OpenSSH_9.2p1 Debian")
            writer.close()

        listener = await asyncio.start_server(greet, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        findings = await ask_dial_back(server, signed, data_port=22, p2p_port=port)
        assert (findings.outside, findings.p2p) == ("", False)  # no libp2p, and no port of a system's service
        assert [name for name, _ in dialler.dialled] == ["127.0.0.1:4444"]
        listener.close()


@pytest.mark.parametrize(
    "host", ["[fec0::1]", "[64:ff9b::a00:1]", "[64:ff9b:1::1]", "[2002:a00:1::1]", "[::a00:1]", "10.0.0.1"]
)
async def test_a_helper_dials_no_private_host_for_a_far_asker(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    async def peer_at(address: Address) -> str:
        tried.append(str(address))
        return ALICE.peer_id

    monkeypatch.setattr("swarm.dht.helper.peer_at", peer_at)
    helper = Helper(SimpleNamespace(), ME, Dialler())  # type: ignore[arg-type]
    found = [await helper._has_p2p_port(ALICE.peer_id, at, 4000, near=False) for at in (host, "8.8.8.8")]
    assert (found, tried) == ([False, True], ["8.8.8.8:4000"])


async def test_a_node_without_a_record_has_its_libp2p_port_tried(tmp_path: Path) -> None:
    async with node(tmp_path, "boot") as boot, node(tmp_path, "alice", boot.addresses, identity=ALICE) as other:
        await serve_dial_back(boot, ME, Dialler())
        findings = await ask_dial_back(other, None, p2p_port=port_of(other.addresses[0]))
        assert (findings.p2p, findings.reached) == (True, False)


async def test_a_helper_says_that_it_is_an_anchor(tmp_path: Path) -> None:
    offer = Offer(public_key=AT.public_key, channel_key=AT.channel_key, addresses=("127.0.0.1:5000",))
    async with node(tmp_path, "boot") as boot, node(tmp_path, "alice", boot.addresses, identity=ALICE) as server:
        await serve_dial_back(boot, ME, Dialler(), lambda: offer)
        findings = await ask_dial_back(server, await announced(server))
        assert next((via.peer, str(via.at)) for via in findings.anchors) == (ANCHOR.peer_id, "127.0.0.1:5000")


async def test_a_helper_dials_nothing_for_somebody_elses_record(tmp_path: Path) -> None:
    dialler = Dialler()
    async with node(tmp_path, "boot") as boot, node(tmp_path, "bob", boot.addresses, identity=BOB) as mallory:
        await serve_dial_back(boot, ME, dialler)
        alices = await announced(boot)
        with pytest.raises(Unreachable, match="not the asker's own"):
            await ask_dial_back(mallory, alices)
        assert dialler.dialled == []


async def test_a_helper_limits_how_often_it_is_asked_and_survives_garbage(tmp_path: Path) -> None:
    dialler = Dialler()
    async with node(tmp_path, "boot") as boot, node(tmp_path, "alice", boot.addresses, identity=ALICE) as server:
        await serve_dial_back(boot, ME, dialler, limits=DialBackLimits(burst=3.0))
        for garbage in (b"", (2**32 - 1).to_bytes(4, "big"), b"\x00\x00\x00\x03abc"):
            reader, writer = await server.open_stream(boot.peer_id, PROTOCOL)
            writer.write(garbage)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 10)
            writer.close()
        signed = await announced(server)
        for _ in range(2):  # of the three at once; the third garbage was read
            await ask_dial_back(server, signed)
        with pytest.raises(TooBusy, match="slow down"):
            await ask_dial_back(server, signed)
        assert len(dialler.dialled) == 2


async def test_a_helper_that_keeps_silent_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        node(tmp_path, "boot") as boot,
        node(tmp_path, "mute", boot.addresses) as mute,
        node(tmp_path, "alice", boot.addresses, identity=ALICE) as server,
    ):

        async def nothing(info: object, reader: object, writer: asyncio.StreamWriter) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                writer.close()

        await mute.handle_stream(PROTOCOL, nothing)
        await serve_dial_back(boot, ME, Dialler(HERE))
        signed = await announced(server, addresses=(HERE,))
        monkeypatch.setattr(server, "neighbours", lambda: (mute.peer_id, boot.peer_id))
        with soon(5):
            findings = await ask_dial_back(server, signed, limits=DialBackLimits(last_helper_s=0.2))
        assert [found.helper for found in findings.found] == [boot.peer_id]
        assert findings.reached


async def test_a_helper_of_the_version_before_is_understood(tmp_path: Path) -> None:
    async with node(tmp_path, "boot") as boot, node(tmp_path, "alice", boot.addresses, identity=ALICE) as server:
        helper = Helper(boot, ME, Dialler(HERE))
        await boot.handle_stream(FORMER, helper.handle_former)  # and nothing else
        findings = await ask_dial_back(server, await announced(server, addresses=(HERE,)), p2p_port=4001)
        assert (findings.reached, findings.p2p) == (True, True)


async def test_an_asker_of_the_version_before_is_helped(tmp_path: Path) -> None:
    async with node(tmp_path, "boot") as boot, node(tmp_path, "alice", boot.addresses, identity=ALICE) as server:
        await serve_dial_back(boot, ME, Dialler(HERE))
        signed = await announced(server, addresses=(HERE,))
        reader, writer = await server.open_stream(boot.peer_id, FORMER)
        await write_message(writer, signed.data)
        answer = Answer.model_validate_json(await read_message(reader, 4096))
        assert answer.answered == (HERE,)
        writer.close()


async def test_a_server_without_helpers_is_told_so(tmp_path: Path) -> None:
    async with node(tmp_path, "alone") as alone:
        with pytest.raises(Unreachable, match="none is known"):
            await ask_dial_back(alone, await announced(alone))


def found_by(*answers: Answer) -> Findings:
    return Findings(tuple(DialledBack(f"helper {i}", answer) for i, answer in enumerate(answers)))


YES, NO = Answer(answered=(HERE,), p2p=True, seen="1.2.3.4", outside=True), Answer(seen="5.6.7.8")


@pytest.mark.parametrize(
    ("answers", "agreed"),
    [((YES,), True), ((NO,), False), ((YES, NO), False), ((YES, YES, NO), True), ((YES, NO, NO), False)],
)
def test_a_claim_counts_if_most_helpers_make_it(answers: tuple[Answer, ...], agreed: bool) -> None:
    findings = found_by(*answers)
    assert (findings.reached, findings.p2p) == (agreed, agreed)
    assert (findings.outside == "1.2.3.4", findings.seen == "1.2.3.4") == (agreed, agreed)


def test_helpers_that_see_different_hosts_agree_on_none() -> None:
    findings = found_by(*(Answer(outside=True, seen=f"1.2.3.{i}") for i in range(3)))
    assert (findings.outside, findings.seen) == ("", "")


@pytest.mark.parametrize(
    ("multiaddr", "host"),
    [
        ("/ip4/1.2.3.4/tcp/4001", "1.2.3.4"),
        ("/ip6/2001:db8::1/tcp/4001", "2001:db8::1"),
        ("/ip4/1.2.3.4/tcp/4001/p2p/12D3/p2p-circuit", ""),
        ("/dns/example.org/tcp/1", ""),
        ("/ip4/elsewhere/tcp/1", ""),
        ("", ""),
    ],
)
def test_an_asker_comes_from_a_literal_address(multiaddr: str, host: str) -> None:
    assert host_of(multiaddr) == host


def test_an_answer_is_strict() -> None:
    with pytest.raises(ValueError, match="answered"):
        Answer.model_validate_json('{"answered": 5}')


def test_a_request_holds_no_more_than_a_record() -> None:
    with pytest.raises(ValueError, match="record"):
        Request(record=b64encode(bytes(7000)).decode())


@pytest.mark.parametrize("seen", ["not an address at all", "0.0.0.0", "224.0.0.1", "fe80::1%eth0", "1.2.3.4:5", "a/b"])
def test_a_helper_names_an_address_to_be_reached_at(seen: str) -> None:
    with pytest.raises(ValidationError, match="seen"):
        Answer(seen=seen, outside=True)
    assert Answer(seen="2001:DB8::1").seen == "2001:db8::1"


async def test_one_silent_asker_keeps_no_other_out(tmp_path: Path) -> None:
    limits = DialBackLimits()
    async with node(tmp_path, "helper") as helping, node(tmp_path, "silent", helping.addresses) as silent:
        helper = Helper(helping, None, None)  # type: ignore[arg-type] - nothing is dialled
        await helping.handle_stream(PROTOCOL, helper.handle)
        streams = [await silent.open_stream(helping.peer_id, PROTOCOL) for _ in range(limits.streams_per_asker + 1)]
        try:
            reading = [asyncio.ensure_future(read_message(reader, limits.answer_bytes_max)) for reader, _ in streams]
            ((first,), _) = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            assert Answer.model_validate_json(silent.gate.seal.open(first.result(), Purpose.ANSWER)).busy
        finally:
            for _, writer in streams:
                writer.close()
            await asyncio.gather(*reading, return_exceptions=True)
