"""The default gateway: the only machine that is asked for ports."""

import asyncio
import ipaddress
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from swarm.net.mapping.way import MappingFailed, is_global

UP, THROUGH_A_GATEWAY = 0x1, 0x2  # linux/route.h


@dataclass(frozen=True, slots=True)
class Gateway:
    """The router's address in this network, and this machine's own; both are IPv4 literals."""

    host: str
    local: str
    pcp_port: int = 5351  # of NAT-PMP, too
    ssdp_port: int = 1900


async def default_gateway() -> Gateway:
    """Find the router. Raises MappingFailed where there is none to ask."""
    host = await _from_system()
    if host is None:
        raise MappingFailed("any protocol", "this machine has no default gateway")
    local = _local_address(host)
    if is_global(local):
        raise MappingFailed("any protocol", f"this machine's own address, {local}, is global: no router maps its ports")
    return Gateway(host, local)


def from_linux(routes: str) -> str | None:
    """Read /proc/net/route: return the gateway of the default route with the lowest metric."""
    found: list[tuple[int, str]] = []
    for line in routes.splitlines()[1:]:
        fields = line.split()
        try:
            destination, gateway, flags, mask = (int(fields[i], 16) for i in (1, 2, 3, 7))
            metric = int(fields[6])
        except (IndexError, ValueError):
            continue
        if destination == mask == 0 and gateway and flags & UP and flags & THROUGH_A_GATEWAY:
            found.append((metric, socket.inet_ntoa(struct.pack("=I", gateway))))  # as the kernel has it in memory
    return min(found)[1] if found else None


def from_macos(printed: str) -> str | None:
    """Read the output of `route -n get default`."""
    for line in printed.splitlines():
        name, _, value = line.strip().partition(": ")
        if name == "gateway":
            try:
                return str(ipaddress.IPv4Address(value.strip()))
            except ValueError:
                return None  # the name of an interface, as VPNs have it
    return None


async def _from_system(system: str = sys.platform) -> str | None:
    try:
        if system == "linux":
            return from_linux(Path("/proc/net/route").read_text(encoding="utf-8"))  # noqa: ASYNC240 - the kernel has it in memory
        if system == "darwin":
            return from_macos(await _macos_route())
    except OSError:
        return None
    return None


async def _macos_route() -> str:
    """macOS has no file for it, and its routing socket is not worth a parser of ours."""
    line = ("/sbin/route", "-n", "get", "default")
    devnull = asyncio.subprocess.DEVNULL
    child = await asyncio.create_subprocess_exec(*line, stdin=devnull, stderr=devnull, stdout=asyncio.subprocess.PIPE)
    printed, _ = await child.communicate()
    return printed.decode(errors="replace")


def _local_address(gateway: str) -> str:
    """Return the address from which this machine reaches the gateway; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((gateway, 1))
        except OSError as error:
            raise MappingFailed("any protocol", f"the gateway {gateway} cannot be reached: {error.strerror}") from None
        return str(sock.getsockname()[0])
