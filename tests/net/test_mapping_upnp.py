"""UPnP with routers that are made here, by miniupnpc in its child."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from swarm.net.address import Tcp
from swarm.net.mapping import MappingLimits, upnp
from swarm.net.mapping.upnp import Upnp
from swarm.net.mapping.way import MappingFailed
from tests.net.routers import answering, at
from tests.net.test_mapping_answers import FOUND

LIMITS = MappingLimits()
WAN = "urn:schemas-upnp-org:service:WANIPConnection:1"
DESCRIPTION = f"""<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0"><device>
<deviceType>urn:schemas-upnp-org:device:InternetGatewayDevice:1</deviceType><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType><serviceList><service>
<serviceType>{WAN}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<controlURL>%s</controlURL><eventSubURL>/e</eventSubURL><SCPDURL>/s.xml</SCPDURL></service></serviceList>
</device></deviceList></device></deviceList></device></root>"""


class Igd:
    """A router's UPnP at 127.0.0.1. taken: ports of other machines. permanent: it knows no leases."""

    def __init__(self, control="/ctl", host="8.8.4.4", taken=(), permanent=False):
        self.control, self.host, self.taken, self.permanent = control, host, taken, permanent
        self.leases: dict[int, int] = {}
        self.url = ""
        self.connections: set[asyncio.Task] = set()

    def soap(self, text: str) -> tuple[int, str]:
        """Answer one action: status and what is in the body."""

        def value(name: str) -> str:
            return text.partition(f"<{name}>")[2].partition("<")[0]

        port = int(value("NewExternalPort") or 0)
        if "GetExternalIPAddress" in text:
            return 200, f"<NewExternalIPAddress>{self.host}</NewExternalIPAddress>"
        if "GetSpecificPortMappingEntry" in text and port in self.taken:
            return 200, "<NewInternalClient>192.168.1.9</NewInternalClient><NewInternalPort>1</NewInternalPort>"
        if "AddPortMapping" in text:
            lease_s = int(value("NewLeaseDuration"))
            if self.permanent and lease_s:
                return 500, "<errorCode>725</errorCode>"
            self.leases[port] = lease_s
            return 200, ""
        if "DeletePortMapping" in text:
            del self.leases[port]
            return 200, ""
        return 500, "<errorCode>714</errorCode>"

    def answer(self, request: bytes) -> bytes:
        if request.startswith(b"GET"):
            status, body = 200, DESCRIPTION % self.control
        else:
            status, body = self.soap(request.decode())
            body = f"<?xml version='1.0'?><s:Envelope><s:Body>{body}</s:Body></s:Envelope>"
        return f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self.exchange(reader, writer)
        writer.close()

    async def exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        writer.write(self.answer(head + await reader.readexactly(length)))
        await writer.drain()

    @asynccontextmanager
    async def running(self, limits: MappingLimits = LIMITS) -> AsyncIterator[Upnp]:
        """Yields what speaks with it."""
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        async with server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/root.xml"
            found = FOUND.replace(b"http://192.168.1.1:5000/root.xml", self.url.encode())
            async with answering(lambda sock, _, asker: sock.sendto(found, asker)) as port:
                way = Upnp(at(port), limits, Random(1))
                await way.probe()
                yield way
        if self.connections:
            await asyncio.wait(self.connections)


async def test_upnp_maps_and_unmaps_a_port() -> None:
    router = Igd()
    async with router.running() as way:
        mapping = await way.map(31330, 31330)
        assert mapping.external == Tcp("8.8.4.4", 31330)
        assert router.leases == {31330: 3600}
        await way.unmap(mapping)
        assert router.leases == {}


async def test_upnp_takes_another_port_where_one_is_taken() -> None:
    router = Igd(taken=(31330,))
    async with router.running() as way:
        mapping = await way.map(31330, 31330)
    assert mapping.external.port != 31330
    assert list(router.leases) == [mapping.external.port]


async def test_upnp_asks_for_no_lease_where_the_router_knows_none() -> None:
    router = Igd(permanent=True)
    async with router.running() as way:
        await way.map(31330, 31330)
    assert router.leases == {31330: 0}


async def test_upnp_speaks_with_no_other_machine() -> None:
    other = Igd()
    server = await asyncio.start_server(other.serve, "127.0.0.1", 0)
    async with server:
        elsewhere = f"http://localhost:{server.sockets[0].getsockname()[1]}/ctl"
        async with Igd(control=elsewhere).running() as way:
            with pytest.raises(MappingFailed, match="another machine"):
                await way.map(31330, 31330)
    assert other.leases == {}


@pytest.mark.parametrize(
    "body", [b"", b"HTTP/1.1 200 OK\r\n\r\n<a><b", b"\0" * 5000, b"HTTP/1.1 200 OK\r\n\r\n" + b"<" * 9999]
)
async def test_upnp_nonsense_is_an_error_with_a_reason(body: bytes) -> None:
    router = Igd()
    router.answer = lambda _: body
    async with router.running() as way:
        with pytest.raises(MappingFailed, match="refuses"):
            await way.map(31330, 31330)


@pytest.mark.parametrize(("piece", "pause_s"), [(b"x" * 65536, 0.0), (b"x", 0.05)])
async def test_upnp_that_floods_or_stalls_ends_in_time(piece: bytes, pause_s: float) -> None:
    router = Igd()

    async def exchange(_, writer):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)

    router.exchange = exchange
    async with router.running(MappingLimits(map_s=1.0)) as way:
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(MappingFailed):
            await way.map(31330, 31330)
        assert asyncio.get_running_loop().time() - began_s < 5.0


async def test_a_child_that_fails_is_a_refusal(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    broken = tmp_path / "igd.py"
    for code in ("raise SystemExit(1)", "import os; os.kill(os.getpid(), 11)", "print('x' * 9999)", "print('[]')"):
        broken.write_text(code)
        monkeypatch.setattr(upnp.igd, "__file__", str(broken))
        with pytest.raises(MappingFailed):
            upnp.read_child(await upnp.run_child(json.dumps({}), 5.0, LIMITS))


async def test_a_missing_miniupnpc_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "miniupnpc", None)
    assert upnp.igd.main({}) == {"why": "miniupnpc is not installed"}
