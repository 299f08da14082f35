"""Faults in the servers of a swarm, and what ends them again. The last live holder of a block is left alone."""

import os
import random
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import psutil
from chaos_places import Machines, fill_disk, free_disk

from swarm.blocks import Blocks, missing_blocks
from swarm.demo.local import LocalProcess, LocalSwarm, Place
from swarm.errors import SwarmError

Kind = Literal["kill", "stop", "p2pd", "blackhole", "disk"]
KINDS: tuple[Kind, ...] = ("kill", "stop", "p2pd", "blackhole", "disk")
TAKING: frozenset[Kind] = frozenset({"kill", "stop", "blackhole"})  # while they last, nobody can use the server
HOLD_S = (3.0, 10.0)  # how long a server is stopped, cut off or without disk space
ON_ROUTE_SHARE = 0.8  # of the faults go to servers that a session uses now, where that is possible
START_TIMEOUT_S = 60.0
P2PD_TIMEOUT_S = 30.0  # a killed p2pd must have been started again by then


@dataclass(slots=True)
class Fault:
    """What was done to a server, from when to when (seconds since the epoch). on_route: how many sessions used it."""

    kind: Kind
    server: int
    peer_id: str
    began: float
    on_route: int
    ended: float | None = None
    note: str = ""


@dataclass(slots=True)
class Slot:
    """One server through all its lives: it is started again with the same identity, blocks and place."""

    number: int  # from 1
    blocks: Blocks
    place: Place
    process: LocalProcess
    peer_id: str = ""
    fault: Fault | None = None
    due: float = 0.0  # when the fault ends, or must have ended
    p2pd: int = 0  # the pid of the one that was killed

    @property
    def live(self) -> bool:
        """Whether it serves, for all that we know."""
        return bool(self.process.ready) and (self.fault is None or self.fault.kind not in TAKING)


@dataclass(frozen=True, slots=True)
class Died:
    """A server that ended although nobody had killed it."""

    server: int
    at: float
    code: int
    said: str


def choose(
    slots: Sequence[Slot], kinds: Sequence[Kind], on_route: Collection[str], rng: random.Random
) -> tuple[Kind, Slot] | None:
    """Return what to do to whom; None while whatever we did would take the last live holder of some block. Pure."""
    kind = rng.choice(kinds)
    able = [slot for slot in slots if slot.process.ready and slot.fault is None]
    if kind in TAKING:
        able = [slot for slot in able if _spare(slot, slots)]
    used = [slot for slot in able if slot.peer_id in on_route]
    if used and rng.random() < ON_ROUTE_SHARE:
        able = used
    return (kind, rng.choice(able)) if able else None


def _spare(slot: Slot, slots: Sequence[Slot]) -> bool:
    """Whether every block of a server has another live holder."""
    return not missing_blocks(slot.blocks, [other.blocks for other in slots if other is not slot and other.live])


@dataclass(slots=True)
class Faults:
    """Does faults and ends them. Every method returns at once; the thread that starts servers must live on."""

    swarm: LocalSwarm
    slots: list[Slot]
    machines: Machines | None
    rng: random.Random
    done: list[Fault] = field(default_factory=list)
    died: list[Died] = field(default_factory=list)

    def begin(self, kind: Kind, slot: Slot, on_route: int) -> bool:
        """Do something to a server. Returns False where there is no p2pd to kill now."""
        fault = Fault(kind, slot.number, slot.peer_id, time.time(), on_route)
        hold_s = self.rng.uniform(*HOLD_S)
        match kind:
            case "kill":
                slot.process.kill()
                self._start_again(slot)
                hold_s = START_TIMEOUT_S
            case "stop":
                os.kill(slot.process.process.pid, signal.SIGSTOP)
            case "p2pd":
                child = p2pd_of(slot.process)
                if child is None:
                    return False
                slot.p2pd = child.pid
                child.kill()
                hold_s = P2PD_TIMEOUT_S
            case "blackhole":
                assert self.machines is not None
                self.machines.drop(slot.number)
            case "disk":
                fill_disk(slot.place.folder)
        slot.fault, slot.due = fault, fault.began + hold_s
        self.done.append(fault)
        return True

    def tick(self) -> None:
        """End what is due, and notice what has ended."""
        for slot in self.slots:
            self._notice_death(slot)
            if slot.fault is not None and self._over(slot, slot.fault):
                slot.fault.ended = time.time()
                slot.fault = None

    def end(self) -> None:
        """Kill every server, whatever state it is in: how servers leave in order is tested elsewhere."""
        for slot in self.slots:
            slot.process.kill()

    def _over(self, slot: Slot, fault: Fault) -> bool:
        """Whether a fault is over; ends it if it is time."""
        late = time.time() >= slot.due
        match fault.kind:
            case "kill":
                return bool(slot.process.ready)
            case "p2pd":
                child = p2pd_of(slot.process)
                if late:
                    fault.note = f"no p2pd {P2PD_TIMEOUT_S:.0f} s later"
                return late or (child is not None and child.pid != slot.p2pd)
            case "stop" if late:
                os.kill(slot.process.process.pid, signal.SIGCONT)
            case "blackhole" if late:
                assert self.machines is not None
                self.machines.deliver(slot.number)
            case "disk" if late:
                free_disk(slot.place.folder)
        return late

    def _notice_death(self, slot: Slot) -> None:
        """Start a server again that has ended by itself, and keep what it said."""
        try:
            slot.process.is_ready()
            code = slot.process.process.poll()
        except SwarmError:
            code = slot.process.process.returncode
        if code is not None and not (slot.fault is not None and slot.fault.kind == "disk"):
            self.died.append(Died(slot.number, time.time(), code, slot.process.last_lines()))
            self._start_again(slot)

    def _start_again(self, slot: Slot) -> None:
        slot.process = start(self.swarm, slot.blocks, slot.place)


def start(swarm: LocalSwarm, blocks: Blocks, place: Place) -> LocalProcess:
    """Start a server at its place, with the identity that is there."""
    return swarm.start_server(str(blocks), "--identity", str(place.folder / "identity"), place=place)


def p2pd_of(server: LocalProcess) -> psutil.Process | None:
    """The p2pd that a server has now."""
    try:
        children = psutil.Process(server.process.pid).children()
        return next((child for child in children if child.name() == "p2pd"), None)
    except psutil.NoSuchProcess:
        return None
