"""Hosts on one bridge, each a network namespace without a way outside. Root alone can make them."""

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Interface
from pathlib import Path

from tests.support.warm import NAMESPACES, enter

MDNS = (5353).to_bytes(2, "big")
UDP = 17


@dataclass(frozen=True, slots=True)
class Host:
    """One host, as one network sees it. namespace: its name for `ip netns`."""

    namespace: str
    at: IPv4Interface

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be on this host in the block: sockets that are made there stay there."""
        with Path("/proc/thread-self/ns/net").open() as before:
            enter(NAMESPACES / self.namespace)
            try:
                yield
            finally:
                enter(Path(f"/proc/self/fd/{before.fileno()}"))


class Wire:
    """All that a bridge has carried since this was made."""

    def __init__(self, hub: Host) -> None:
        with hub.entered():
            everything = 0x0003  # ETH_P_ALL
            self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(everything))
            self.socket.bind(("bridge", 0))
            self.socket.setblocking(False)

    def mdns(self) -> list[bytes]:
        """Return the packets of multicast DNS that have come since the last call."""
        found = []
        while True:
            try:
                frame = self.socket.recv(65536)
            except BlockingIOError:
                return found
            ip = frame[14:]
            head = 4 * (ip[0] & 15)
            if frame[12:14] == b"\x08\x00" and ip[9] == UDP and ip[head + 2 : head + 4] == MDNS:
                found.append(ip[head + 8 :])


def why_not() -> str:
    """Return why there can be no bridge here, or nothing."""
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    if os.geteuid() != 0:
        return "only root makes network namespaces that have names"
    try:
        with bridge(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.decode().strip()}"


@contextmanager
def bridge(count: int, third_byte: int = 0, guests: Sequence[Host] = ()) -> Iterator[tuple[list[Host], Wire]]:
    """Join so many new hosts by a bridge, in 10.78.<third_byte>.0/24. They are gone when the block ends.

    guests: hosts of other bridges that are joined, too, before the new ones.
    """
    name = f"swarm-{secrets.token_hex(4)}"
    with ExitStack() as closing:
        hub = Host(f"{name}-hub", IPv4Interface("127.0.0.1"))
        _add(hub.namespace, closing)
        _run("ip", "-n", hub.namespace, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", hub.namespace, "link", "set", "bridge", "up")
        names = [guest.namespace for guest in guests]
        for number in range(1, count + 1):
            names.append(f"{name}-{number}")
            _add(names[-1], closing)
            _run("ip", "-n", names[-1], "link", "set", "lo", "up")
        hosts = [Host(each, IPv4Interface(f"10.78.{third_byte}.{i}/24")) for i, each in enumerate(names, 1)]
        for host in hosts:
            _plug_in(host, hub, f"lan{third_byte}")
        wire = Wire(hub)
        closing.callback(wire.socket.close)
        yield hosts, wire


def _plug_in(host: Host, hub: Host, interface: str) -> None:
    port = f"port{int(host.at.ip) & 255}"
    _run("ip", "-n", hub.namespace, "link", "add", port, "type", "veth", "peer", interface, "netns", host.namespace)
    _run("ip", "-n", hub.namespace, "link", "set", port, "master", "bridge", "up")
    _run("ip", "-n", host.namespace, "address", "add", str(host.at), "broadcast", "+", "dev", interface)
    _run("ip", "-n", host.namespace, "link", "set", interface, "up")


def change_address(host: Host, to: IPv4Interface, interface: str = "lan0", *, keep: bool = False) -> Host:
    """Give a host another address in the place of its own, or beside it (keep)."""
    if not keep:
        _run("ip", "-n", host.namespace, "address", "flush", "dev", interface, "scope", "global")
    _run("ip", "-n", host.namespace, "address", "add", str(to), "broadcast", "+", "dev", interface)
    return Host(host.namespace, to)


def add_ipv6(host: Host, *, alone: bool, interface: str = "lan0") -> str:
    """Give a host an address of IPv6 (fd78::/64). alone: and take all of IPv4 away, loopback's too. Returns it."""
    address = f"fd78::{int(host.at.ip) & 255:x}"
    _run("ip", "-n", host.namespace, "address", "add", f"{address}/64", "dev", interface, "nodad")
    if alone:
        for each in (interface, "lo"):
            _run("ip", "-n", host.namespace, "-4", "address", "flush", "dev", each)
    return address


def _add(namespace: str, closing: ExitStack) -> None:
    _run("ip", "netns", "add", namespace)
    closing.callback(_run, "ip", "netns", "del", namespace)


def _run(*line: str) -> None:
    subprocess.run(line, check=True, capture_output=True)
