"""UPnP-IGD: the router is found by SSDP here, and spoken with in a child process (`igd.py`).

miniupnpc could find it, too: only by a wait of a fixed time, in a thread that cannot be ended, and it would fetch
descriptions from any machine that answers. Here the description comes from the default gateway, or there is none.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.net.address import Tcp
from swarm.net.launch import command
from swarm.net.mapping import igd
from swarm.net.mapping.ask import Question, ask
from swarm.net.mapping.gateway import Gateway
from swarm.net.mapping.limits import MappingLimits
from swarm.net.mapping.way import By, Malformed, Mapping, MappingFailed

SSDP_GROUP = "239.255.255.250"
DEVICES = (  # a router of version 2 answers for version 1; not all do
    "urn:schemas-upnp-org:device:InternetGatewayDevice:1",
    "urn:schemas-upnp-org:device:InternetGatewayDevice:2",
    "urn:schemas-upnp-org:service:WANIPConnection:1",
    "urn:schemas-upnp-org:service:WANPPPConnection:1",
)


class Answer(BaseModel):
    """What the child printed: of a mapping, of its end, or why there is none."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    host: str = Field(default="", max_length=64)
    port: int = Field(default=0, ge=0, le=65535)
    why: str = Field(default="", max_length=200)


class Upnp:
    """As `Way`."""

    by: By = "UPnP"

    def __init__(self, gateway: Gateway, limits: MappingLimits, random: Random) -> None:
        self._gateway, self._limits, self._random = gateway, limits, random
        self._url = ""  # of the description, once it is known

    async def probe(self) -> None:
        """As `Way.probe`."""
        self._url = await locate(self._gateway, self._limits)

    async def map(self, internal: int, external: int) -> Mapping:
        """As `Way.map`."""
        limits = self._limits
        spare = self._random.sample(range(20_000, 60_000), limits.spare_ports)
        wish = {"internal": internal, "external": external, "spare": spare, "lease_s": limits.lease_s, "unmap": None}
        answer = await self._run(wish, limits.map_s)
        return Mapping(internal, Tcp(answer.host, answer.port), self.by, limits.lease_s)

    async def unmap(self, mapping: Mapping) -> None:
        """As `Way.unmap`."""
        await self._run({"unmap": mapping.external.port}, self._limits.unmap_s)

    async def _run(self, wish: dict[str, object], within_s: float) -> Answer:
        request = {"url": self._url, "host": self._gateway.host} | wish
        printed = await run_child(json.dumps(request), within_s, self._limits)
        answer = read_child(printed)
        if answer.why:
            raise MappingFailed("UPnP", f"the router refuses: {answer.why}")
        return answer


async def locate(gateway: Gateway, limits: MappingLimits) -> str:
    """Return the URL of the router's description. Raises MappingFailed.

    The search goes to the group, and to the router alone: firewalls drop answers to what was sent to a group.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        sock.bind((gateway.local, 0))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(gateway.local))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 2)  # UPnP Device Architecture 1.1, 1.3.2
    except OSError:
        sock.close()
        raise
    places = ((SSDP_GROUP, gateway.ssdp_port), (gateway.host, gateway.ssdp_port))
    sends = [(search(device), place) for place in places for device in DEVICES]
    question = Question(gateway.host, lambda data: read_search(data, gateway.host), limits)
    return await ask("UPnP", sock, sends, question, limits.probe_s, limits)


def search(device: str) -> bytes:
    """Return an SSDP search. A router waits up to a second (MX) before it answers one that went to the group."""
    lines = ("M-SEARCH * HTTP/1.1", f"HOST: {SSDP_GROUP}:1900", 'MAN: "ssdp:discover"', "MX: 1", f"ST: {device}")
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


def read_search(data: bytes, host: str) -> str:
    """Return the URL of the description, which must be on the host that answered. Raises Malformed."""
    first, *lines = data.decode("latin-1").splitlines() or [""]
    if not re.fullmatch(r"HTTP/1\.[01] 200( .*)?", first):
        raise Malformed("no answer to a search")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if not headers.get("st", "").startswith(tuple(device.rpartition(":")[0] for device in DEVICES)):
        raise Malformed("of a device that is no router")
    try:
        url = urlsplit(headers.get("location", ""))
        port = url.port or 80
    except ValueError:
        raise Malformed("the location is no URL") from None
    if url.scheme != "http" or url.hostname != host or url.username is not None or url.password is not None:
        raise Malformed("the location is on another machine")
    path = f"{url.path or '/'}{'?' if url.query else ''}{url.query}"
    if not re.fullmatch(r"/[!-~]{0,255}", path):
        raise Malformed("the location has a strange path")
    return f"http://{host}:{port}{path}"  # put together anew: another parser reads it


def read_child(printed: bytes) -> Answer:
    """Read what the child printed. Raises MappingFailed."""
    try:
        return Answer.model_validate_json(printed)
    except ValidationError:
        raise MappingFailed("UPnP", "the router's answer made miniupnpc fail") from None


async def run_child(request: str, within_s: float, limits: MappingLimits) -> bytes:
    """Return what the child prints. Whatever happens, it has ended afterwards. Raises MappingFailed."""
    line = command(
        sys.executable,
        "-P",  # or the folder of the script would be searched for modules
        str(Path(igd.__file__)),
        request,
        descriptors_max=limits.child_descriptors_max,
        data_bytes_max=limits.child_bytes_max,
    )
    devnull, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    # Ctrl-C in a terminal reaches the command alone, which then has its ports removed by such a child.
    child = await asyncio.create_subprocess_exec(
        *line,
        stdin=devnull,
        stdout=pipe,
        stderr=devnull,
        start_new_session=True,
        limit=limits.child_answer_bytes_max,
    )
    assert child.stdout is not None
    try:
        async with asyncio.timeout(within_s):
            printed = await child.stdout.readline()
            await child.wait()
            return printed
    except ValueError:
        raise MappingFailed("UPnP", "miniupnpc's answer is too long") from None
    except TimeoutError:
        raise MappingFailed("UPnP", f"no answer in {within_s:.1f} s") from None
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)  # child.kill() would reap what asyncio's watcher waits for
            await child.wait()
