"""The anchors of one world, which die and return, and the servers that are reached through them only."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from swarm.dht.dialback import Answer, DialledBack, Findings, Offer
from swarm.dht.records import Announcement, SignedAnnouncement
from swarm.dht.validator import Entry
from swarm.errors import NetworkError, Unreachable
from swarm.identity import Identity
from swarm.net.address import Tcp, ViaAnchor
from swarm.net.addresses import Change
from swarm.net.channel import OnMessage
from swarm.net.endpoint import Remote
from swarm.server.announcer import Announcer
from swarm.server.reachable import Listening, Reachability
from tests.simulation.anchors import (
    Line,
    VirtualAnchor,
    VirtualHalf,
    VirtualMoorings,
    Ways,
    open_half,
    punched,
    relayed,
)
from tests.simulation.network import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

STEADY_S = 5.0  # an anchor counts when it has been there, and a server moored at it, for so long
HELPERS = 3  # of one dial-back


class Harbour:
    """All anchors, and the hidden processes by name."""

    def __init__(self, world: "World", seed: int, network_name: str) -> None:
        self.world, self.network, self.alive = world, world.network, world.alive
        self.anchors: dict[str, VirtualAnchor] = {}  # the present process at each address
        self.deaths = self.relayed = self.punched = 0
        self._rng = Random(f"anchors {seed}")
        self._seed, self._network_name = seed, network_name
        self._berths: dict[str, Berth] = {}  # by address
        self._steady_since: dict[str, float] = {}  # of each running anchor, by address

    # Anchors

    def populate(self) -> None:
        """Start all anchors."""
        for number in range(self.world.weather.anchors):
            self._begin(f"a{number + 1}", Identity(self._rng.randbytes(32)))

    async def churn(self) -> None:
        """Anchors die, each in its way, and return."""
        rate = self.world.weather.anchor_deaths_per_min / 60
        while rate:
            await asyncio.sleep(self._rng.expovariate(rate))
            running = [anchor for anchor in self.anchors.values() if anchor.process.state == "running"]
            if running:
                self._die(self._rng.choice(running).process)
                self.world.note_coverage()

    def _begin(self, name: str, identity: Identity) -> None:
        key = SimpleNamespace(public=self._rng.randbytes(32))
        me: Any = SimpleNamespace(identity=identity, key=key, network=self._network_name)
        process = Process(name, me, f"{name}:1", ends=Line)
        self.network.processes[process.address] = process
        self.anchors[process.address] = VirtualAnchor(process, self.world.gate(self.world.wall_clock).own_record)
        self._steady_since[process.address] = self.world.loop.time()
        self.world.trace.note("anchor begins", name)

    def _die(self, process: Process) -> None:
        self.deaths += 1
        self._steady_since.pop(process.address, None)
        back_s, draw = self._rng.uniform(1.0, 40.0), self._rng.random()
        again: Callable[[], None] = partial(self._begin, process.name, process.me.identity)
        if draw < 0.4:
            self.world.trace.note("anchor stalls", process.name)
            process.stop()
            again = partial(self._wake, process)
        elif draw < 0.6:
            self.world.trace.note("anchor vanishes", process.name)
            self.network.vanish(process)
        else:
            self.world.trace.note("anchor crashes", process.name)
            self.network.kill(process)
        self.world.loop.call_later(back_s, again)

    def _wake(self, process: Process) -> None:
        self.world.trace.note("anchor wakes", process.name)
        self._steady_since[process.address] = self.world.loop.time()
        process.resume()

    # Hidden processes

    def hides(self, address: str) -> bool:
        """Whether a router lets no connection in to this address."""
        return address in self._berths

    def berth(self, name: str, process: Process) -> "Berth | None":
        """Return the hidden side of a server, for those that are behind a router."""
        if Random(f"hidden {self._seed} {name}").random() >= self.world.weather.hidden:
            return None
        berth = self._berths[process.address] = Berth(self, process)
        return berth

    def note_record(self, process: Process, entry: Entry) -> None:
        """The DHT has a new record of a server."""
        if process.address in self._berths:
            self._berths[process.address].named = [tuple(one) for one in json.loads(entry.data[64:])["anchors"]]

    async def watch(self) -> None:
        """Look again and again through which anchors hidden servers can be reached."""
        while True:
            for berth in self._berths.values():
                if not berth.process.dead:
                    berth.look()
            await asyncio.sleep(0.5)

    def leads(self, anchor: tuple[str, str, str], process: Process) -> bool:
        """Whether an anchor that a record names leads to a hidden server now."""
        key, channel_key, address = anchor
        present = self.anchors[address]
        via, now = present.process, self.world.loop.time()
        return (
            via.me.key.public.hex() == channel_key
            and via.me.identity.public_key.hex() == key
            and now - self._steady_since.get(address, now) >= STEADY_S
            and process.me.identity.peer_id in present.moored
            and not self.network.is_cut(via.name, process.name)
            and not self.network.is_cut(via.name, "client")
        )

    # Meetings

    async def open_half(self, source: Process, at: Tcp, token: str) -> VirtualHalf:
        """Bring a token to an anchor. Raises OSError."""
        await self.alive(source)
        target = self.network.processes[str(at)]
        await open_half(self.network, source, target)
        half, halves = VirtualHalf(source), self.anchors[str(at)].virtual_halves
        trip_s = self.network.link(source.name, target.name).latency_s
        bring = partial(halves.bring, bytes.fromhex(token), half)
        self.world.loop.call_later(trip_s, target.enter, bring)
        return half

    async def become(
        self, source: Process, at: ViaAnchor, target: Process, remote: Remote, on_message: OnMessage, relays: bool
    ) -> Any:
        """Return the better channel to a process that was met at an anchor. Raises NetworkError."""
        if self.punches(source, target) and not self.network.is_cut(source.name, target.name):
            try:
                channel = await punched(self.network, source, target, remote, on_message)
                self.punched += 1
                return channel
            except NetworkError:
                pass  # the joined halves are still there
        anchor = self.anchors[str(at.at)]
        if not relays:
            raise Unreachable(remote.peer, (str(at),), 0.0, "the anchor relays no more")
        channel = await relayed(self.network, source, anchor, target, remote, on_message)
        self.relayed += 1
        return channel

    def punches(self, source: Process, target: Process) -> bool:
        """Whether two processes that have met reach each other directly: one is public, or both routers keep ports."""
        return not self.hides(target.address) or (self._keeps_ports(source) and self._keeps_ports(target))

    def _keeps_ports(self, process: Process) -> bool:
        public = not self.hides(process.address) and process.name != "client"
        return public or Random(f"router {self._seed} {process.name}").random() < self.world.weather.cones

    # Dial-back

    async def ask(self, process: Process, signed: SignedAnnouncement) -> Findings:
        """Return the findings of three anchors, as `ask_dial_back` does. Raises Unreachable."""
        await self.alive(process)
        await asyncio.sleep(self._rng.uniform(0.1, 0.5))
        helpers = [
            anchor
            for anchor in self.anchors.values()
            if anchor.process.state == "running" and not self.network.is_cut(anchor.process.name, process.name)
        ]
        if not helpers:
            raise Unreachable("a node that dials us back", (), 0.0, "none is known")
        chosen = self._rng.sample(helpers, min(HELPERS, len(helpers)))
        return Findings(tuple(self._found(anchor, process, signed.announcement) for anchor in chosen))

    def _found(self, anchor: VirtualAnchor, process: Process, record: Announcement) -> DialledBack:
        me = anchor.process.me
        through = [
            mooring.public_key
            for mooring in record.anchors
            if process.me.identity.peer_id in self.anchors[mooring.address].moored
        ]
        offer = Offer(
            public_key=me.identity.public_key.hex(),
            channel_key=me.key.public.hex(),
            addresses=(anchor.process.address,),
        )
        answer = Answer(silent=record.addresses, through=tuple(through), seen=process.name, anchor=offer)
        return DialledBack(me.identity.peer_id, answer)


class Berth:
    """The hidden side of one server: how it is reached, by production code."""

    def __init__(self, harbour: Harbour, process: Process) -> None:
        self.named: list[Any] = []  # the anchors of its record in the DHT
        self.ways = Ways(harbour, process)
        self._harbour, self.process = harbour, process
        self._led: dict[Any, float] = {}  # since when each of these leads here
        self._newest: Callable[[], SignedAnnouncement | None] = lambda: None
        moorings = VirtualMoorings(harbour, process, self.ways.lines, self._record)
        traversal: Any = SimpleNamespace(moorings=moorings, caller=self.ways.caller)
        listening = Listening((process.address,), Tcp("127.0.0.1", 1), 1)
        node: Any = _Node()
        self.reach = Reachability(node, process.me, traversal, listening, _stays(), ask=self._ask)

    def follow(self, announcer: Announcer) -> None:
        """Announce anew when the moorings change."""
        self.reach.on_change = announcer.change
        self._newest = lambda: announcer.directory.latest

    async def find(self, announcer: Announcer) -> None:
        """Moor before the server is online, as `serve` does."""
        while not await self.reach.find(announcer.attempt):
            await self.reach.news()

    def look(self) -> None:
        """Note through which anchors it can be reached now."""
        now = self._harbour.world.loop.time()
        self._led = {
            anchor: self._led.get(anchor, now) for anchor in self.named if self._harbour.leads(anchor, self.process)
        }

    def is_reached(self, now: float) -> bool:
        """Whether a client can count on reaching it."""
        return any(
            now - since >= STEADY_S and anchor in self.named and self._harbour.leads(anchor, self.process)
            for anchor, since in self._led.items()
        )

    def _record(self) -> bytes:
        newest = self._newest()
        return newest.data if newest is not None else b""

    async def _ask(self, node: object, signed: SignedAnnouncement, **ports: object) -> Findings:
        del node, ports
        return await self._harbour.ask(self.process, signed)


async def _stays() -> AsyncIterator[Change]:
    """A machine that never moves, as `changes`."""
    await asyncio.Event().wait()
    yield Change(())


class _Node:
    """A node of the DHT that always knows others."""

    async def back(self) -> bool:
        """As `SwarmNode.back`."""
        return True

    def neighbours(self) -> tuple[str, ...]:
        """As `SwarmNode.neighbours`."""
        return ("another",)

    async def promote(self) -> None:
        """As `SwarmNode.promote`."""

    def demote(self) -> None:
        """As `SwarmNode.demote`."""
