"""An anchor: it brings callers and the hidden peers that are moored at it together (docs/reach.md).

A hidden peer keeps one sealed channel to an anchor open: its mooring. A caller asks the anchor for it. Where the caller
can be dialled, the anchor only tells the hidden peer, which dials it. Else both open a half, and the anchor joins the
two and tells each from where the other's came: they punch, and leave the joined halves as soon as that succeeds.

An anchor dials no peer. It tells a moored peer to dial only the host from which the caller's own channel comes, at a
port that no system service has. A relayed channel comes from another anchor, which no caller may have dialled. Each
cost has a bound, per peer and for all.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import structlog

from swarm.errors import ChannelClosed, SwarmError
from swarm.limits import limit
from swarm.net.address import Tcp
from swarm.net.admission import source_of
from swarm.net.channel import Channel
from swarm.net.gate import IDLE, Toll
from swarm.net.halves import TOKEN_BYTES, Half, Halves
from swarm.net.load import Load, LoadLimits, Told
from swarm.net.rate import TokenBucket
from swarm.net.relay import Relayed, RelayLimits, room_for
from swarm.net.rtt import rtt_s
from swarm.net.splice import Meter, Splice
from swarm.protocol.base import Message
from swarm.protocol.meeting import (
    LOAD,
    SPEED_MAX,
    AnchorInquiry,
    AnchorLoad,
    Call,
    Called,
    Calling,
    Meet,
    Moor,
    Moored,
    Uncalled,
)
from swarm.protocol.messages import AnyMessage

Check = Callable[[str, bytes], object]
"""`check(peer, record)`: raise SwarmError unless this is a living record of the peer, in this network."""

_log = structlog.get_logger("swarm.anchor")


@dataclass(frozen=True, slots=True)
class AnchorLimits:
    """How many peers an anchor brings together."""

    moorings_max: int = limit(1024, "moorings", "at one time; more are refused")
    moorings_per_host_max: int = limit(16, "moorings", "from one address; more are refused")
    call_per_s: float = limit(2.0, "calls/s", "of one caller; more are refused as busy")
    call_burst: float = limit(16.0, "calls", "of one caller at once")
    called_per_s: float = limit(4.0, "calls/s", "to one hidden peer, which ignores more; more are refused as busy")
    called_burst: float = limit(32.0, "calls", "to one hidden peer at once")
    all_per_s: float = limit(50.0, "calls/s", "in all; more are refused as busy")
    recent: float = limit(16.0, "calls", "of one source, after which half of the calls at once are kept for others")
    forgotten_per_s: float = limit(0.05, "calls/s", "of these are forgotten")
    callers_max: int = limit(4096, "callers", "whose rate is remembered; a new one is refused while all have a debt")
    meetings_max: int = limit(512, "meetings", "that wait for a half; more are refused as busy")
    meeting_s: float = limit(8.0, "s", "both halves must be here by then")
    relay: RelayLimits = field(default_factory=RelayLimits)
    load: LoadLimits = field(default_factory=LoadLimits)


@dataclass(slots=True)
class _Meeting:
    """Two peers that come together. tokens: of the caller's half and the callee's."""

    call: str
    sides: tuple[Channel, Channel]
    tokens: tuple[bytes, bytes]
    halves: dict[int, Half] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


class Anchor:
    """The meetings and the relay of one process. Lives in the event loop."""

    def __init__(self, halves: Halves, check: Check, limits: AnchorLimits = AnchorLimits()) -> None:
        """halves: those that come to this process's listener. check: of the records of those that moor."""
        self.limits = limits
        self.moored: dict[str, Channel] = {}
        self._halves, self._check = halves, check
        self._meter = Meter(max(1.0, limits.relay.bytes_per_s), limits.relay.burst)
        self._all = TokenBucket(limits.all_per_s, limits.all_per_s)
        self._rates: dict[tuple[str, str], TokenBucket] = {}  # of "call", "called" or "from", and a peer or a source
        self._meetings: dict[bytes, _Meeting] = {}  # by the caller's token
        self._pairs: dict[Splice, Relayed] = {}  # the oldest first
        self._joining: set[asyncio.Task[None]] = set()
        self._load, self._told = Load(), Told(asyncio.get_running_loop().time(), limits.load)

    @property
    def load(self) -> Load:
        """Its present and past work."""
        self._load.moored, self._load.pairs = len(self.moored), len(self._pairs)
        self._load.meetings = len(self._meetings)
        self._load.relayed_bytes = self._meter.relayed_bytes
        return self._load

    def take(self, channel: Channel, message: AnyMessage) -> Toll:
        """Take a Moor, a Call or an AnchorInquiry."""
        match message:
            case Moor():
                self._moor(channel, bytes.fromhex(message.record))
            case Call():
                self._call(channel, message)
            case AnchorInquiry():
                self._tell(channel)
        return IDLE

    def close(self) -> None:
        """End all meetings and all relayed pairs."""
        for meeting in list(self._meetings.values()):
            self._forget(meeting)
        for pair in list(self._pairs):
            pair.end()
        for task in self._joining:
            task.cancel()

    # Mooring

    def _moor(self, channel: Channel, record: bytes) -> None:
        try:
            self._check(channel.peer, record)
        except SwarmError as error:
            _say(channel, Uncalled(cause="refused", why=str(error)))
            return
        before = self.moored.get(channel.peer)
        if before is None:
            of_host = sum(moored.carrier.host == channel.carrier.host for moored in self.moored.values())
            if len(self.moored) >= self.limits.moorings_max or of_host >= self.limits.moorings_per_host_max:
                self._load.refused += 1
                _say(channel, Uncalled(cause="busy", why="too many peers are moored here", retry_after_ms=60_000))
                return
        self.moored[channel.peer] = channel
        if before is not channel:
            channel.ended.add_done_callback(lambda _: self._gone(channel))
        _say(channel, Moored(seen=channel.carrier.host))

    def _gone(self, channel: Channel) -> None:
        if self.moored.get(channel.peer) is channel:
            del self.moored[channel.peer]

    # Calls

    def _call(self, caller: Channel, call: Call) -> None:
        refusal = self._refusal(caller, call.callee)
        if refusal is not None:
            self._load.refused += refusal.cause == "busy"
            _say(caller, refusal.model_copy(update={"call": call.call}))
            return
        callee = self.moored[call.callee]
        meeting = _Meeting(
            call.call, (caller, callee), (secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(TOKEN_BYTES))
        )
        self._meetings[meeting.tokens[0]] = meeting
        for side, token in enumerate(meeting.tokens):
            self._halves.expect(token, partial(self._arrive, meeting, side))
        meeting.timer = asyncio.get_running_loop().call_later(self.limits.meeting_s, self._forget, meeting)
        self._load.calls += 1
        mine, theirs = (token.hex() for token in meeting.tokens)
        host = caller.carrier.host if caller.carrier.way != "relayed" else ""
        _say(callee, self._called(caller.peer, call, host, theirs))
        _say(caller, Calling(call=call.call, token=mine))

    def summon(self, peer: str, call: Call, host: str) -> None:
        """Tell a moored peer to dial this process itself. Raises ChannelClosed if it is not moored."""
        if call.callee not in self.moored:
            raise ChannelClosed(call.callee, "it is not moored here")
        self.moored[call.callee].send(self._called(peer, call, host, secrets.token_hex(TOKEN_BYTES)))

    def _called(self, caller: str, call: Call, host: str, token: str) -> Called:
        reach = str(Tcp(host, call.port)) if host and call.port >= 1024 else ""
        return Called(call=call.call, token=token, caller=caller, reach=reach, back=call.back)

    def _refusal(self, caller: Channel, callee: str) -> Uncalled | None:
        """Return why a call is refused, or count it."""
        if callee not in self.moored:
            return Uncalled(cause="away", why="the peer is not moored here")
        if len(self._meetings) >= self.limits.meetings_max:
            return _busy("too many meetings", self.limits.meeting_s / 2)
        return self._charge(caller, callee)

    def _charge(self, caller: Channel, callee: str = "") -> Uncalled | None:
        """Count a call, or a question that concerns no other peer; or return why not.

        The more calls a source has made recently, the more it leaves to others: a crowd that calls without pause keeps
        no quiet caller away.
        """
        limits, now = self.limits, asyncio.get_running_loop().time()
        ours = self._rate("call", caller.peer, limits.call_per_s, limits.call_burst, now)
        recent = self._rate("from", source_of(caller.carrier.host), limits.forgotten_per_s, limits.recent, now)
        theirs = self._rate("called", callee, limits.called_per_s, limits.called_burst, now) if callee else self._all
        if ours is None or theirs is None or recent is None:
            return _busy("too many callers", 1.0)
        kept = recent.used(now) / 2
        wait_s = max(ours.wait_s(now), theirs.wait_s(now, kept), self._all.wait_s(now, kept))
        if wait_s > 0:
            return _busy("too many calls", wait_s)
        for bucket in {ours, theirs, recent, self._all}:
            bucket.owe(now)
        return None

    def _rate(self, kind: str, peer: str, per_s: float, burst: float, now: float) -> TokenBucket | None:
        if (kind, peer) not in self._rates:
            if len(self._rates) >= self.limits.callers_max:
                self._rates = {key: bucket for key, bucket in self._rates.items() if not bucket.is_full(now)}
            if len(self._rates) >= self.limits.callers_max:
                return None
            self._rates[kind, peer] = TokenBucket(per_s, burst)
        return self._rates[kind, peer]

    # Load

    def _tell(self, asker: Channel) -> None:
        """Tell a peer the load. An answer counts as a call of that peer."""
        now = asyncio.get_running_loop().time()
        refusal = self._charge(asker)
        if refusal is not None:
            self._load.refused += 1
            _say(asker, refusal.model_copy(update={"call": LOAD}))
            return
        _say(asker, self._told.answer(now, self._look, self._meter.relayed_bytes))

    def _look(self, relayed_bytes_per_s: float) -> AnchorLoad:
        load, limits = self.load, self.limits
        return AnchorLoad(
            moored=load.moored,
            moored_max=limits.moorings_max,
            meetings=load.meetings,
            meetings_max=limits.meetings_max,
            pairs=load.pairs,
            pairs_max=limits.relay.pairs_max if limits.relay.bytes_per_s > 0 else 0,
            relayed_bytes_per_s=min(SPEED_MAX, round(relayed_bytes_per_s)),
            relayed_bytes_per_s_max=min(SPEED_MAX, round(limits.relay.bytes_per_s)),
            refused=load.refused,
        )

    # Halves

    def _arrive(self, meeting: _Meeting, side: int, half: Half) -> None:
        meeting.halves[side] = half
        if len(meeting.halves) < 2:
            return
        first, second, sides = meeting.halves[0], meeting.halves[1], meeting.sides
        meeting.halves = {}  # they are the pair's now
        self._forget(meeting)
        loop = asyncio.get_running_loop()
        far = [rtt_s(half.sock) for half in (first, second)]
        near = first.outer.host == second.outer.host
        for i, theirs in enumerate((second, first)):
            meet = Meet(
                token=meeting.tokens[i].hex(),
                peer=str(theirs.outer),
                local=str(theirs.inner) if near else "",
                rtt_ms=min(60_000, round(1000 * sum(far))),
            )
            loop.call_later(max(0.0, (max(far) - far[i]) / 2), _say, sides[i], meet)
        self._join(sides, first, second)

    def _join(self, sides: tuple[Channel, Channel], first: Half, second: Half) -> None:
        """Relay between them, within the limits; else they can still punch, with halves that wait."""
        limits, new = self.limits.relay, Relayed(sides[0].peer, sides[1].peer, source_of(first.outer.host))
        room = room_for(new, self._pairs, limits)
        if not room.is_there or limits.bytes_per_s <= 0:
            self._load.refused += not room.is_there
            held = asyncio.create_task(_hold(first, second))
            self._joining.add(held)
            held.add_done_callback(self._joining.discard)
            return
        if room.ends is not None:
            room.ends.end()
        own = TokenBucket(limits.pair_bytes_per_s, limits.pair_burst)
        pair = Splice(self._meter, own, limits.silent_s, lambda: self._pairs.pop(pair, None) and None)
        self._pairs[pair] = new
        task = asyncio.create_task(self._begin(pair, first, second))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def _begin(self, pair: Splice, first: Half, second: Half) -> None:
        try:
            await pair.join(first.sock, second.sock)
        except OSError as error:
            _log.debug("a half has gone", why=str(error))

    def _forget(self, meeting: _Meeting) -> None:
        """The meeting is over: no half belongs to it any more."""
        if meeting.timer is not None:
            meeting.timer.cancel()
        self._meetings.pop(meeting.tokens[0], None)
        for token in meeting.tokens:
            self._halves.forget(token)
        for half in meeting.halves.values():
            half.sock.close()


async def _hold(*halves: Half) -> None:
    """Keep halves open that are not joined: the router of each would close the mapping that a punch needs."""
    try:
        await asyncio.sleep(4.0)
    finally:
        for half in halves:
            half.sock.close()


def _busy(why: str, wait_s: float) -> Uncalled:
    return Uncalled(cause="busy", why=why, retry_after_ms=round(1000 * wait_s) + 1)


def _say(channel: Channel, message: Message) -> None:
    if not channel.closed:
        channel.send(message)
