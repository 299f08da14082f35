"""A home router in network namespaces: nftables masquerades, miniupnpd speaks PCP, NAT-PMP and UPnP. Needs root.

home 192.168.77.2 -- 192.168.77.1 router 8.8.4.1 -- 8.8.4.2 outside
"""

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

LAN = "192.168.77"
OUTSIDE = "8.8.4.2"
_numbers = itertools.count()
GLOBAL, CARRIERS = "8.8.4.1", "100.64.4.1"  # the router's outer address: an own one, or one behind a carrier's NAT
NFT = """
table inet filter {
  chain miniupnpd { }
  chain prerouting_miniupnpd { }
  chain postrouting_miniupnpd { }
  chain prerouting { type nat hook prerouting priority -100; policy accept; jump prerouting_miniupnpd; }
  chain postrouting {
    type nat hook postrouting priority 100; policy accept;
    jump postrouting_miniupnpd; oifname "wan0" masquerade;
  }
  chain forward {
    type filter hook forward priority 0; policy accept;
    jump miniupnpd; iifname "wan0" ct state new drop;
  }
}
"""
CONFIG = f"""
ext_ifname=wan0
listening_ip=lan0
enable_natpmp=yes
enable_upnp=yes
uuid=00000000-0000-0000-0000-000000000001
upnp_table_name=filter
upnp_nat_table_name=filter
upnp_forward_chain=miniupnpd
upnp_nat_chain=prerouting_miniupnpd
upnp_nat_postrouting_chain=postrouting_miniupnpd
secure_mode=yes
min_lifetime=120
max_lifetime=86400
allow 1024-65535 {LAN}.0/24 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
"""


def missing() -> str:
    """Say why there can be no router here; "" where there can."""
    programs = [name for name in ("ip", "nft", "miniupnpd") if shutil.which(name) is None]
    if programs:
        return f"needs {', '.join(programs)}: apt-get install iproute2 nftables miniupnpd-nftables"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    probe = f"swarm-{os.getpid()}-probe"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    return "" if done.returncode == 0 else f"network namespaces do not work here: {done.stderr.strip()}"


@dataclass(frozen=True, slots=True)
class Router:
    """The three namespaces."""

    home: str
    router: str
    outside: str

    def popen(self, where: str, *line: str, **options) -> subprocess.Popen:
        """Start a program in one of them."""
        return subprocess.Popen(["ip", "netns", "exec", where, *line], text=True, **options)

    def reached(self, port: int) -> bool:
        """Tell whether a connection from outside to this port of the router's is answered."""
        code = f"import socket; s = socket.create_connection(('{GLOBAL}', {port}), 2); print(s.recv(9).decode())"
        child = self.popen(self.outside, sys.executable, "-c", code, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        return child.communicate()[0] == "here\n"

    def rules(self) -> str:
        """Return the router's table."""
        child = self.popen(self.router, "nft", "list", "table", "inet", "filter", stdout=subprocess.PIPE)
        return child.communicate()[0]


@contextmanager
def home_router(folder: Path, outer: str = GLOBAL, daemon: bool = True) -> Iterator[Router]:
    """Run a router, without a daemon one that maps no ports."""
    names = [f"swarm-{os.getpid()}-{next(_numbers)}-{name}" for name in ("home", "router", "outside")]
    with ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
            _ip("-n", name, "link", "set", "lo", "up")
        lab = Router(*names)
        _link(lab, outer)
        line = ("ip", "netns", "exec", lab.router)
        subprocess.run([*line, "sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
        subprocess.run([*line, "nft", "-f", "-"], input=NFT, text=True, check=True)
        if daemon:
            stack.enter_context(_daemon(lab, folder))
        yield lab


def _link(lab: Router, outer: str) -> None:
    for name, near, far in ((lab.home, "eth0", "lan0"), (lab.outside, "eth0", "wan0")):
        _ip("-n", name, "link", "add", near, "type", "veth", "peer", "name", far, "netns", lab.router)
    wan = outer.rpartition(".")[0]
    places = ((lab.home, "eth0", f"{LAN}.2"), (lab.router, "lan0", f"{LAN}.1"))
    for name, device, address in (*places, (lab.router, "wan0", outer), (lab.outside, "eth0", f"{wan}.2")):
        _ip("-n", name, "address", "add", f"{address}/24", "dev", device)
        _ip("-n", name, "link", "set", device, "up")
    _ip("-n", lab.home, "route", "add", "default", "via", f"{LAN}.1")


@contextmanager
def _daemon(lab: Router, folder: Path) -> Iterator[None]:
    config, log = folder / "miniupnpd.conf", folder / "miniupnpd.log"
    config.write_text(CONFIG)
    line = ("miniupnpd", "-d", "-f", str(config), "-P", str(folder / "miniupnpd.pid"))
    with log.open("w") as out, lab.popen(lab.router, *line, stdout=out, stderr=out) as child:
        try:
            deadline = time.monotonic() + 10
            while "HTTP listening" not in log.read_text() or "Listening for NAT-PMP" not in log.read_text():
                assert child.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
            yield
        finally:
            child.terminate()


def _ip(*line: str) -> None:
    subprocess.run(["ip", *line], check=True)
