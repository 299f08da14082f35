"""Peers of one network find each other by multicast DNS (RFC 6762, RFC 6763), without any address.

    async with announced(Hint(network=tag_of("public", access), peer=me), 31331, networks()): ...
    peers = await browse(Sought.of("public", access), LanLimits().client_s)  # multiaddrs to join through

An announcement is a hint from a stranger on the same network. It decides which addresses a node calls on, and nothing
else: peers prove their identities, and records and roots are checked, as everywhere. Only private and link-local
addresses of this host's own networks are announced and believed. IPv4 alone.
"""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from swarm.access import Access
from swarm.config import NETWORK_PATTERN, PROTOCOL_VERSION
from swarm.errors import BadConfiguration
from swarm.groups import ungrouped
from swarm.identity import public_key_of
from swarm.limits import limit

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

SERVICE = "_swarm._tcp.local."
PRIVATE = tuple(map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16")))

_log = structlog.get_logger("swarm.lan")


@dataclass(frozen=True, slots=True)
class LanLimits:
    """How nodes look for each other on one network."""

    peers_max: int = limit(8, "peers", "taken from one network at a time; more are left out")
    names_max: int = limit(64, "names", "heard and not yet looked at; more are left out")
    text_bytes_max: int = limit(512, "bytes", "of an announcement's text; a longer one is left out")
    addresses_max: int = limit(16, "addresses", "of an announcement that are looked at; more are left out")
    networks_max: int = limit(8, "networks", "of this host that a node announces itself on; more are left out")
    ask_s: float = limit(1.0, "s", "an announcement without address or text is asked for them, then left out")
    settle_s: float = limit(0.3, "s", "after a peer was found, others are waited for so long")
    client_s: float = limit(2.0, "s", "a client without initial peers that has found none by then fails")
    meet_s: float = limit(2.0, "s", "a node goes on by then, even if no peer that it found answers")
    server_s: float = limit(2.0, "s", "a server without initial peers that has found none by then is the first")
    again_s: float = limit(60.0, "s", "a node that stays asks anew so often: two networks may have become one")
    poll_s: float = limit(5.0, "s", "between two looks at this host's networks; they may change")


class Hint(BaseModel):
    """The text of an announcement."""

    model_config = ConfigDict(strict=True, frozen=True)

    network: Annotated[str, Field(pattern=rf"{NETWORK_PATTERN}|^key:[0-9a-f]{{32}}$")]  # of `tag_of`
    peer: Annotated[str, Field(pattern="^[1-9A-HJ-NP-Za-km-z]{40,60}$")]  # id: base58 decoders pass over blanks
    version: Annotated[int, Field(ge=1, le=65535)] = PROTOCOL_VERSION
    root: Annotated[str, Field(pattern="^([0-9a-f]{16})?$")] = ""  # the first digits of the model's; "": not yet known

    @field_validator("peer")
    @classmethod
    def _is_a_peer_id(cls, value: str) -> str:
        public_key_of(value)
        return value

    @classmethod
    def of(cls, properties: "dict[bytes, bytes | None]") -> "Hint":
        """Read an announcement's text. Raises ValueError. Unknown fields are of another version."""
        known = {name: value for name in cls.model_fields if (value := properties.get(name.encode())) is not None}
        texts: dict[str, Any] = {name: value.decode("ascii") for name, value in known.items()}
        if not texts.get("version", "1").isdigit() or len(texts.get("version", "")) > 5:
            raise ValueError("the version is no number")
        return cls(**texts | {"version": int(texts.get("version", "1"))})

    @property
    def properties(self) -> dict[str, str]:
        """The text as DNS has it."""
        return {name: str(value) for name, value in self.model_dump().items() if value != ""}


@dataclass(frozen=True, slots=True)
class Sought:
    """The peers that are looked for. tag: of the swarm. own: this node's id, "" for a client."""

    tag: str
    access: Access
    own: str = ""

    @classmethod
    def of(cls, network: str, access: Access, own: str = "") -> "Sought":
        """Look for members of a swarm."""
        return cls(tag_of(network, access), access, own)

    def takes(self, hint: Hint) -> bool:
        """Tell whether an announcement is of another member that speaks this protocol."""
        ours = hint.network == self.tag and hint.version == PROTOCOL_VERSION
        return ours and hint.peer != self.own and self.access.admits(hint.peer)


def tag_of(network: str, access: Access) -> str:
    """Return a swarm's name as announcements have it: behind a network key, only its members know the name."""
    if access.network_key is None:
        return network
    return "key:" + hmac.digest(access.network_key.derive("lan discovery"), network.encode(), "sha256").hex()[:32]


def networks() -> tuple[IPv4Interface, ...]:
    """Return this host's addresses, with their networks: private or link-local, up, and able to multicast."""
    try:
        addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    except OSError:
        return ()
    found = []
    for name, state in states.items():
        flags = set(state.flags.split(",")) - {""}  # Windows tells none
        if not state.isup or flags & {"loopback", "pointopoint"} or (flags and "multicast" not in flags):
            continue
        found += [
            IPv4Interface(f"{each.address}/{each.netmask or 32}")
            for each in addresses.get(name, ())
            if each.family.name == "AF_INET"
        ]
    return tuple(each for each in found if _is_private(each.ip))[: LanLimits().networks_max]


async def ways_in(given: tuple[str, ...], network: str, access: Access, *, lan: bool) -> tuple[str, ...]:
    """Return the multiaddrs to join through: those given, or else those of the peers on this network.

    lan: whether to look there. Raises BadConfiguration where there are none.
    """
    if given:
        return given
    found = await browse(Sought.of(network, access), LanLimits().client_s) if lan else ()
    if not found:
        nearby = f"no server of swarm {network!r} was found on this network; " if lan else ""
        raise BadConfiguration(
            "initial_peers", f"{nearby}pass the address of a node (--initial-peers), or set SWARM_INITIAL_PEERS"
        )
    return found


def told(found: Sequence[str]) -> str:
    """Return one line about peers that were found."""
    hosts = [":".join(address.split("/")[2:5:2]) for address in found]
    return f"found {len(found)} peer{'s' * (len(found) != 1)} on this network: {', '.join(hosts)}"


async def browse(sought: Sought, within_s: float, where: Sequence[IPv4Interface] | None = None) -> tuple[str, ...]:
    """Return the multiaddrs of peers on this host's networks, `LanLimits.peers_max` at most. None is no error."""
    try:
        async with watching(sought, networks() if where is None else where, LanLimits()) as watch:
            found = await watch.first(within_s)
    except OSError as error:
        _log.warning("cannot look for others on this network", why=str(error))
        return ()
    if found:
        _log.info(told(found))
    return found


# --- hearing ---------------------------------------------------------------------------------------------------------


class Watch:
    """The peers that are heard at present. Made by `watching`."""

    def __init__(self, sought: Sought, where: Sequence[IPv4Interface], limits: LanLimits) -> None:
        self._sought, self._where, self._limits = sought, where, limits
        self._names: asyncio.Queue[str] = asyncio.Queue(limits.names_max)
        self._found: dict[str, str] = {}  # multiaddrs by the names of the services
        self._news = asyncio.Event()

    @property
    def peers(self) -> tuple[str, ...]:
        """Their multiaddrs."""
        return tuple(self._found.values())

    @property
    def waiting(self) -> int:
        """The number of names that are still to be looked at."""
        return self._names.qsize()

    async def first(self, within_s: float) -> tuple[str, ...]:
        """Wait for the first peers: a little longer than for the first one."""
        if await self.news(within_s):
            while len(self._found) < self._limits.peers_max and await self.news(self._limits.settle_s):
                pass
        return self.peers

    async def news(self, within_s: float) -> bool:
        """Wait until other peers are heard than before. Returns whether that came in time."""
        try:
            async with asyncio.timeout(within_s):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    def hear(self, name: str, gone: bool) -> None:
        """Take the name of a service that has come, has changed or is gone."""
        if not gone and not self._names.full():
            self._names.put_nowait(name)
        elif gone and self._found.pop(name.lower(), None) is not None:
            self._news.set()

    async def ask(self, zeroconf: "AsyncZeroconf") -> None:
        """Ask for services, and hear of those that come and go, until cancelled."""
        from zeroconf import DNSQuestionType, ServiceStateChange  # noqa: PLC0415 - as below
        from zeroconf.asyncio import AsyncServiceBrowser  # noqa: PLC0415

        def on_change(*, name: str, state_change: ServiceStateChange, **_: object) -> None:
            self.hear(name, state_change is ServiceStateChange.Removed)

        options: Any = {"handlers": [on_change], "question_type": DNSQuestionType.QM}
        while True:
            async with AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, **options):  # asks a few times at its start
                await asyncio.sleep(self._limits.again_s)

    async def look(self, zeroconf: "AsyncZeroconf") -> None:
        """Look at the services that were heard, one after the other, until cancelled."""
        while True:
            name = await self._names.get()
            try:
                await self._look_at(name, zeroconf)
            except Exception as error:  # noqa: BLE001 - strangers' words in a library's parsers
                _log.debug("an announcement that cannot be read", error=repr(error)[:200])

    async def _look_at(self, name: str, zeroconf: "AsyncZeroconf") -> None:
        from zeroconf import DNSQuestionType, IPVersion  # noqa: PLC0415 - a tenth of a second that few commands need
        from zeroconf.asyncio import AsyncServiceInfo  # noqa: PLC0415

        info = AsyncServiceInfo(SERVICE, name)
        # Asked by multicast, as all is: a unicast answer reaches only one of the programs at port 5353.
        if await info.async_request(zeroconf.zeroconf, self._limits.ask_s * 1000, DNSQuestionType.QM):
            addresses = [IPv4Address(each) for each in info.addresses_by_version(IPVersion.V4Only)]
            self.take(info.name, info.text or b"", info.properties, addresses, info.port or 0)

    def take(
        self,
        name: str,
        text: bytes,
        properties: "dict[bytes, bytes | None]",
        addresses: Sequence[IPv4Address],
        port: int,
    ) -> None:
        """Believe an announcement, or not. text: as it came; properties: the same, taken apart."""
        key, limits = name.lower(), self._limits  # names of the DNS have no case
        try:
            if len(text) > limits.text_bytes_max or not 0 < port < 65536:
                return
            hint = Hint.of(properties)
        except (ValidationError, ValueError):
            return
        near = [each for each in addresses[: limits.addresses_max] if _is_near(each, self._where)]
        if not near or not self._sought.takes(hint) or key != f"{hint.peer}.{SERVICE}".lower():
            return
        if key not in self._found and len(self._found) >= limits.peers_max:
            return
        address = f"/ip4/{near[0]}/tcp/{port}/p2p/{hint.peer}"
        if self._found.get(key) != address:
            self._found[key] = address
            self._news.set()


@asynccontextmanager
async def watching(sought: Sought, where: Sequence[IPv4Interface], limits: LanLimits) -> AsyncIterator[Watch]:
    """Listen for a swarm's peers on these networks of this host, while the block runs. Raises OSError."""
    watch = Watch(sought, where, limits)
    if not where:
        yield watch
        return
    zeroconf = _opened(where)
    try:
        with ungrouped():
            async with asyncio.TaskGroup() as group:
                # As many as peers, because an announcement that leads nowhere holds one of them up.
                looking = [group.create_task(watch.look(zeroconf)) for _ in range(limits.peers_max)]
                looking.append(group.create_task(watch.ask(zeroconf)))
                yield watch
                for task in looking:
                    task.cancel()
    finally:
        await zeroconf.async_close()


def _is_private(address: IPv4Address) -> bool:
    return any(address in network for network in PRIVATE)


def _is_near(address: IPv4Address, where: Sequence[IPv4Interface]) -> bool:
    """Tell whether an address is one of a host on these networks: a stranger names any address."""
    ends = {end for each in where for end in (each.network.network_address, each.network.broadcast_address)}
    own = {each.ip for each in where}
    near = any(address in each.network for each in where) and (address in own or address not in ends)
    return near and _is_private(address)


# --- telling ---------------------------------------------------------------------------------------------------------


class Announcement:
    """A node as its networks hear of it. Made by `announced`."""

    def __init__(self, hint: Hint, port: int) -> None:
        self._hint, self._port = hint, port
        self._told: list[tuple[AsyncZeroconf, IPv4Interface]] = []
        self._telling: list[asyncio.Future[Any]] = []

    async def tell(self, where: Sequence[IPv4Interface]) -> None:
        """Begin on these networks: each hears the address that this host has there. Raises OSError."""
        from zeroconf import Error  # noqa: PLC0415

        for each in where:
            zeroconf = _opened([each])
            self._told.append((zeroconf, each))
            # Its own responders on other networks have the same name; they hear each other, too.
            telling = zeroconf.async_register_service(self._info(each), cooperating_responders=True)
            try:
                self._telling.append(asyncio.ensure_future(await telling))
            except Error as error:
                raise OSError(f"multicast DNS does not start: {error!r}") from None

    async def change(self, root: str) -> None:
        """Tell the root of the model that this node serves, if it is not yet told."""
        if root[:16] == self._hint.root:
            return
        self._hint = self._hint.model_copy(update={"root": root[:16]})
        for zeroconf, each in self._told:
            self._telling.append(asyncio.ensure_future(await zeroconf.async_update_service(self._info(each))))

    async def end(self) -> None:
        """Say goodbye, on all networks at once."""
        for telling in self._telling:
            telling.cancel()
        await asyncio.gather(*(zeroconf.async_close() for zeroconf, _ in self._told))

    def _info(self, each: IPv4Interface) -> "AsyncServiceInfo":
        from zeroconf.asyncio import AsyncServiceInfo  # noqa: PLC0415

        name, properties = f"{self._hint.peer}.{SERVICE}", self._hint.properties
        addresses, port = [each.ip.packed], self._port
        return AsyncServiceInfo(SERVICE, name, addresses=addresses, port=port, properties=properties, server=name)


@asynccontextmanager
async def announced(hint: Hint, port: int, where: Sequence[IPv4Interface]) -> AsyncIterator[Announcement]:
    """Announce a node on these networks of this host, while the block runs. port: of its libp2p. Raises OSError."""
    announcement = Announcement(hint, port)
    try:
        await announcement.tell(where)
        yield announcement
    finally:
        await announcement.end()


def _opened(where: Sequence[IPv4Interface]) -> "AsyncZeroconf":
    """Open port 5353 on these networks. Raises OSError."""
    from zeroconf import IPVersion  # noqa: PLC0415
    from zeroconf.asyncio import AsyncZeroconf  # noqa: PLC0415

    logging.getLogger("zeroconf").setLevel(logging.CRITICAL)  # it warns of strangers' packets
    return AsyncZeroconf(interfaces=[str(each.ip) for each in where], ip_version=IPVersion.V4Only)
