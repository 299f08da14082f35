"""Which routers there are, and the nftables rules that make a namespace such a router."""

from dataclasses import dataclass

OUTSIDE = "wan0"  # a router's interface to the internet, or to its carrier's router
INSIDE = "lan0"  # a router's bridge


@dataclass(frozen=True, slots=True)
class Router:
    """One router that translates addresses.

    opens: for which sources a host's outgoing connection opens its outer port: "connection" is the far end's address
    and port alone, "address" is every port of that address, "anyone" is every address. random: each connection gets a
    random outer port; otherwise it keeps the host's own. resets: an unexpected SYN is answered with RST; otherwise it
    is dropped. forwards: what no connection asked for goes to the first host, as with forwarded ports.
    """

    opens: str = "connection"
    random: bool = False
    resets: bool = False
    forwards: bool = False


PORT_RESTRICTED = Router()
SYMMETRIC = Router(random=True)

# From the internet inwards. "public" hosts have no router.
KINDS: dict[str, tuple[Router, ...]] = {
    "public": (),
    "forwarded": (Router(forwards=True),),
    "full_cone": (Router(opens="anyone"),),
    "address_restricted": (Router(opens="address"),),
    "port_restricted": (PORT_RESTRICTED,),
    "reject": (Router(resets=True),),
    "symmetric": (SYMMETRIC,),
    "double": (PORT_RESTRICTED, PORT_RESTRICTED),
    "double_symmetric": (SYMMETRIC, PORT_RESTRICTED),
}

# Opened ports: (protocol, outer port[, source]) to the host that opened it. Ports are kept, so outer and inner are one.
_KEYS = {
    "anyone": ("meta l4proto . th sport", "meta l4proto . th dport"),
    "address": ("meta l4proto . th sport . ip daddr", "meta l4proto . th dport . ip saddr"),
}


def rules(router: Router, first_host: str) -> str:
    """Return the rules for `nft -f`. first_host: the address that forwarded connections go to."""
    opening, opened, forwarding = "", "", ""
    declared = ""
    if router.opens in _KEYS:
        outgoing, incoming = _KEYS[router.opens]
        declared = f"map opened {{ typeof {outgoing} : ip saddr\n flags dynamic,timeout\n timeout 5m\n }}"
        opening = f"oifname {OUTSIDE} meta l4proto {{ tcp, udp }} update @opened {{ {outgoing} : ip saddr }}"
        opened = f"iifname {OUTSIDE} meta l4proto {{ tcp, udp }} dnat to {incoming} map @opened"
    if router.forwards:
        forwarding = f"iifname {OUTSIDE} meta l4proto {{ tcp, udp }} dnat to {first_host}"
    refusing = f"iifname {OUTSIDE} meta l4proto tcp reject with tcp reset" if router.resets else ""
    return f"""
table ip lab {{
  {declared}
  chain leaving {{
    type nat hook postrouting priority srcnat
    {opening}
    oifname {OUTSIDE} masquerade {"fully-random" if router.random else ""}
  }}
  chain arriving {{
    type nat hook prerouting priority dstnat
    {opened}
    {forwarding}
  }}
  chain own {{
    type filter hook input priority filter
    ct state established,related accept
    {refusing}
    iifname {OUTSIDE} drop
  }}
  chain passing {{
    type filter hook forward priority filter
    ct state established,related accept
    ct status dnat accept
    iifname {OUTSIDE} drop
  }}
}}
"""
