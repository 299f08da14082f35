"""The lab: sites with their routers and hosts, joined by an internet with delays."""

import json
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from swarm.demo.local import Place
from tests.support.lab import internet
from tests.support.lab.namespaces import PYTHON, LabError, Namespace, Namespaces
from tests.support.lab.routers import INSIDE, KINDS, OUTSIDE, Router, rules

HOME = "192.168.1"  # every home's network, as with real routers of one maker
CARRIER = "100.64.0"  # between a carrier's router and a home's
NETWORKS = (CARRIER, HOME)  # inside the routers of a site that has two; one has the latter
LAN_PORT = "eth0"
FIRST_HOST = 10  # a network's hosts have the numbers from here on
STOP_S = 5.0  # for a process to end after SIGTERM; then it is killed
RUN_S = 60.0  # for a command that the lab waits for
SITES_MAX = 200  # each has a /16 of its own


class Lab:
    """A context manager; all sites, namespaces and processes end with it."""

    def __enter__(self) -> Self:
        with ExitStack() as closing:
            self._namespaces = closing.enter_context(Namespaces())
            self._middle = self._namespaces.make()
            self._control, given = socket.socketpair()
            with given:
                line = self._middle.command((*PYTHON, str(internet.__file__)))
                self._internet = subprocess.Popen(line, stdin=given, process_group=0)
            closing.callback(_end, self._internet)
            closing.callback(self._control.close)
            self._answers = closing.enter_context(self._control.makefile("rb"))
            self._sites: list[Site] = []
            self._processes: list[subprocess.Popen[Any]] = []
            closing.callback(self._end_processes)
            self._closing = closing.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def site(self, kind: str, delay_ms: float = 0.0) -> "Site":
        """Connect one more site to the internet.

        kind: one of KINDS. delay_ms: one way, between the site and the middle; a packet pays both of its sites' delays.
        """
        if len(self._sites) == SITES_MAX:
            raise LabError(f"at most {SITES_MAX} sites")
        site = Site(self, len(self._sites) + 1, kind, delay_ms)
        self._sites.append(site)
        return site

    def public_host(self, delay_ms: float = 0.0) -> "Host":
        """Return a host that has a public address."""
        return self.site("public", delay_ms).host()

    def lan(self) -> "Lan":
        """Make a network of its own, with neither router nor way out. Its hosts hear each other's multicasts."""
        return Lan(self, self.namespace(), HOME)

    def traffic(self, sender: "Site", receiver: "Site") -> int:
        """Return the bytes of IP packets that one site has sent to another since the lab began."""
        sent: int = self.ask({})["sent"].get(sender.cable, {}).get(receiver.cable, 0)
        return sent

    def sent_to(self, receiver: "Site") -> int:
        """The same of all sites together, what only arrived at a router included."""
        return sum(to.get(receiver.cable, 0) for to in self.ask({})["sent"].values())

    @property
    def internet_pid(self) -> int:
        """The process that carries all packets."""
        return self._internet.pid

    def namespace(self) -> Namespace:
        """Make an empty network that ends with the lab."""
        return self._namespaces.make()

    def middle(self) -> Namespace:
        """Where the far ends of the sites' cables are."""
        return self._middle

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Give the internet a command. Raises LabError if it has ended."""
        self._control.sendall(json.dumps(command).encode() + b"\n")
        line = self._answers.readline()
        if not line:
            raise LabError(f"the lab's internet ended with {self._internet.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def started(self, process: "subprocess.Popen[Any]") -> None:
        """Note a process that is to end with the lab."""
        self._processes.append(process)

    def _end_processes(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            _end(process)


class Site:
    """One connection to the internet: a public host, or a network behind one router or two."""

    def __init__(self, lab: Lab, number: int, kind: str, delay_ms: float) -> None:
        self.lab, self.kind = lab, kind
        self.cable = f"cable{number}"  # the interface's name in the middle
        self._number, self._moves = number, 0
        self._outermost = lab.namespace()
        self._plug_in()
        lab.ask({"site": self.cable, "address": self.public_address, "delay_s": delay_ms / 1000})
        self._network = self._build(KINDS[kind])
        self._public: Host | None = None

    @property
    def public_address(self) -> str:
        """The address that the internet sees. Every site has a /16 of its own. They are global to `ipaddress`."""
        return f"11.{self._number}.{self._moves}.1"

    def host(self) -> "Host":
        """Add a host. A public site has one only."""
        if self._network is not None:
            return self._network.host(self)
        if self._public is not None:
            raise LabError("a public site has one host")
        self._public = Host(self.lab, self._outermost, OUTSIDE, None, self)
        return self._public

    def renumber(self) -> str:
        """Give the site another public address, at once. Returns it. Old connections end, or hear nothing more."""
        before = self.public_address
        self._moves += 1
        # the new one first: an interface without any address loses its routes
        self._outermost.configure(
            f"ip address add {self.public_address}/32 dev {OUTSIDE}\nip address del {before}/32 dev {OUTSIDE}"
        )
        self.lab.ask({"site": self.cable, "address": self.public_address})
        return self.public_address

    def set_delay(self, delay_ms: float) -> None:
        """Change the delay, one way. Packets under way keep theirs."""
        self.lab.ask({"site": self.cable, "delay_s": delay_ms / 1000})

    def disconnect(self) -> None:
        """Drop silently all that the site sends and gets, packets under way too."""
        self.lab.ask({"site": self.cable, "connected": False})

    def reconnect(self) -> None:
        """Undo `disconnect`."""
        self.lab.ask({"site": self.cable, "connected": True})

    def become(self, kind: str) -> None:
        """Replace the only router by one of another kind, at once. Connections that are open go on."""
        (router,) = KINDS[kind]
        net = NETWORKS[-1]
        self._outermost.configure(
            _routing(f"table ip lab {{}}\ndelete table ip lab{rules(router, f'{net}.{FIRST_HOST}')}")
        )
        self.kind = kind

    def _build(self, routers: Sequence[Router]) -> "Lan | None":
        """Make the routers, from the internet inwards. Returns the innermost network; None: no router."""
        namespace, network = self._outermost, None
        for router, net in zip(routers, NETWORKS[len(NETWORKS) - len(routers) :], strict=True):
            if network is not None:
                namespace = network.router()
            namespace.configure(_routing(rules(router, f"{net}.{FIRST_HOST}")))
            network = Lan(self.lab, namespace, net, routed=True)
        return network

    def _plug_in(self) -> None:
        # One hardware address for all sites' ends and no ARP: a frame from any of them fits every other.
        middle = self.lab.middle()
        self._outermost.configure(
            f"""
            ip link add {OUTSIDE} address 02:00:00:00:00:01 type veth \
                peer name {self.cable} address 02:00:00:00:00:02 netns {middle.pid}
            ip link set {OUTSIDE} arp off
            ip address add {self.public_address}/32 dev {OUTSIDE}
            ip link set {OUTSIDE} up
            ip route add default dev {OUTSIDE}
            """
        )
        middle.configure(f"ip link set {self.cable} up")


class Lan:
    """A bridge with hosts, in the namespace of the router if there is one."""

    def __init__(self, lab: Lab, namespace: Namespace, network: str, routed: bool = False) -> None:
        """network: the first three numbers of its addresses."""
        self._lab, self._namespace, self._network, self._routed = lab, namespace, network, routed
        self._ports = 0
        namespace.configure(
            f"""
            ip link add {INSIDE} type bridge mcast_snooping 0
            ip address add {network}.1/24 dev {INSIDE}
            ip link set {INSIDE} up
            """
        )

    def host(self, site: Site | None = None) -> "Host":
        """Add a host. site: that the network belongs to."""
        namespace = self._lab.namespace()
        address = self.attach(namespace, LAN_PORT)
        host = Host(self._lab, namespace, LAN_PORT, address, site, f"via {self._network}.1" if self._routed else "")
        host.plug()
        return host

    def router(self) -> Namespace:
        """Add a namespace whose way out is this network."""
        namespace = self._lab.namespace()
        self.attach(namespace, OUTSIDE)
        namespace.configure(f"ip link set {OUTSIDE} up\nip route add default via {self._network}.1")
        return namespace

    def attach(self, namespace: Namespace, interface: str) -> str:
        """Connect a namespace by an interface, which is still down. Returns its address."""
        port, address = f"port{self._ports}", f"{self._network}.{FIRST_HOST + self._ports}"
        self._ports += 1
        namespace.configure(
            f"""
            ip link add {interface} type veth peer name {port} netns {self._namespace.pid}
            ip address add {address}/24 dev {interface}
            """
        )
        self._namespace.configure(f"ip link set {port} master {INSIDE} up")
        return address


class Host:
    """A machine of the lab. It has no disk of its own."""

    def __init__(
        self, lab: Lab, namespace: Namespace, interface: str, address: str | None, site: Site | None, way_out: str = ""
    ) -> None:
        self.namespace, self.site = namespace, site
        self._lab, self._interface, self._address = lab, interface, address
        self._way_out = way_out or f"dev {interface}"

    @property
    def address(self) -> str:
        """Its own address, which is private behind a router."""
        if self._address is not None:
            return self._address
        assert self.site is not None
        return self.site.public_address

    def renumber(self) -> str:
        """Give a machine of a LAN another address, at once. Returns it. Nothing comes to the old one any more."""
        assert self._address is not None, "a public host's address is its site's"
        network, _, number = self._address.rpartition(".")
        before, self._address = self._address, f"{network}.{int(number) + 100}"
        self.namespace.configure(
            f"""
            ip address del {before}/24 dev {self._interface}
            ip address add {self._address}/24 dev {self._interface}
            ip route add default {self._way_out}
            """
        )
        return self._address

    def popen(self, line: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """Start a command there. options: of `subprocess.Popen`. It is ended with the lab, if not before."""
        process = subprocess.Popen(self.namespace.command(line), process_group=0, **options)
        self._lab.started(process)
        return process

    def run(self, line: Sequence[str], timeout_s: float = RUN_S) -> str:
        """Run a command there. Returns what it prints. Raises LabError if it fails or takes too long."""
        with self.popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                printed, errors = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise LabError(f"{line[0]} did not end within {timeout_s:g} s") from error
        if process.returncode:
            raise LabError(f"{' '.join(line)} ended with {process.returncode}: {errors}{printed}")
        return str(printed)

    def socket(self, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """Return a new socket of this host; the caller closes it."""
        return self.namespace.socket(kind)

    def place(self, folder: Path) -> Place:
        """Return where a process of the swarm runs. folder: of its log and identity."""
        return Place(folder, "0.0.0.0", str(self.namespace.path))

    def unplug(self) -> None:
        """Take its interface down."""
        self.namespace.configure(f"ip link set {self._interface} down")

    def plug(self) -> None:
        """Take its interface up, with its default route."""
        self.namespace.configure(f"ip link set {self._interface} up\nip route replace default {self._way_out}")


def _routing(nft: str) -> str:
    return f"""
echo 1 > /proc/sys/net/ipv4/ip_forward
echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter
nft -f - <<'end'
{nft}
end
"""


def _end(process: "subprocess.Popen[Any]") -> None:
    """Wait for a process that has been asked to end, and kill it if it does not. Its pipes are closed."""
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
