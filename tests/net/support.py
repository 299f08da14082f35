"""Two channels over an in-memory carrier that can be tampered with, and helpers of the tests of `swarm.net`."""

import asyncio
import time

import torch

from swarm.access import EVERYBODY
from swarm.activations import Activations
from swarm.identity import Identity
from swarm.net.channel import Channel
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.flow import FlowControl
from swarm.net.gate import PROGRESS
from swarm.net.limits import ChannelLimits, FrameLimits, KeepaliveLimits, ReadLimits
from swarm.net.noise import ChannelKey
from swarm.protocol.messages import Step
from swarm.protocol.tensors import meta_of

SESSION = "ab" * 16


def endpoint(identity=None, key=None, **options):
    """Some side of a channel."""
    return Endpoint(identity or Identity.generate(), key or ChannelKey(), "public", **options)


def remote(me):
    """The other side, as one that reaches it knows it."""
    return Remote(me.identity.peer_id, me.key.public)


async def until(condition):
    """Wait for something that happens soon."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


class Pipe:
    """One direction of an in-memory connection; bytes that are written wait in `held` until they are delivered."""

    def __init__(self):
        self.held = []
        self.channel = None  # the one that receives
        self.sender = None
        self.closed = self.paused = False
        self.resumed = 0
        self.back = self  # the other direction

    def write(self, data):
        self.held.append(bytes(data))

    def unsent_bytes(self):
        return sum(map(len, self.held))

    def close(self):
        self.closed = True
        if self.sender is not None:
            self.sender.lost("closed")

    def abort(self):
        self.held.clear()
        self.close()

    def pause_reading(self):
        self.back.paused = True

    def resume_reading(self):
        self.back.paused = False
        self.back.resumed += 1

    def deliver(self):
        if self.paused:
            return
        data, self.held = b"".join(self.held), []
        if data:
            self.channel.receive(data)


class Pair:
    """Two channels, connected: a has dialled b."""

    def __init__(
        self,
        *,
        network="public",
        a_access=EVERYBODY,
        b_access=EVERYBODY,
        ids=None,
        limits=None,
        flow=None,
        a_flow=None,
        clock=time.perf_counter,
    ):
        """limits: b's. flow: b's, shared with other pairs. clock: a's."""
        self.a_id, self.b_id = ids or (Identity.generate(), Identity.generate())
        self.b_me = Endpoint(self.b_id, ChannelKey(), "public", b_access)
        self.a_me = Endpoint(self.a_id, ChannelKey(), network, a_access, clock)
        self.to_a, self.to_b = Pipe(), Pipe()
        self.at_a, self.at_b = [], []
        self.worth = PROGRESS  # of each message that b takes
        self.flow = flow or FlowControl(limits)
        self.b = Channel(self.to_a, self.b_me, self._at_b, flow=self.flow)
        self.a = Channel(self.to_b, self.a_me, self._at_a, remote(self.b_me), a_flow)
        self.to_a.channel, self.to_b.channel = self.a, self.b
        self.to_a.back, self.to_b.back = self.to_b, self.to_a
        self.to_a.sender, self.to_b.sender = self.b, self.a

    def _at_a(self, _, *message):
        self.at_a.append(message)
        return PROGRESS

    def _at_b(self, _, *message):
        self.at_b.append(message)
        return self.worth

    def shake(self):
        for _ in range(3):
            self.to_b.deliver()
            self.to_a.deliver()
        return self


def step(number=1, shape=(1, 3, 8)):
    """A step and its activations."""
    hidden = torch.randn(*shape)
    message = Step(session=SESSION, epoch=0, step=number, keep=0, budget_ms=1000, want=1, hidden=meta_of(hidden))
    return message, Activations(hidden)


def channel_limits(*, frames=None, keepalives=None, **reading):
    """Limits with these changes, by their names."""
    return ChannelLimits(FrameLimits(**(frames or {})), ReadLimits(**reading), KeepaliveLimits(**(keepalives or {})))
