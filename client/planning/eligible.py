"""Which servers a route may use, and which of their blocks. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from swarm.activations import NumericClass, Tier, tier_of
from swarm.blocks import Blocks, missing_blocks
from swarm.client.planning.promise import Held
from swarm.client.planning.request import Request, key_and_process, keys_of
from swarm.dht.records import Announcement, SignedAnnouncement
from swarm.errors import NoRoute


class Reason(StrEnum):
    """Why a server is not in a route."""

    SLOWER = "slower"  # the best route through it takes longer
    NO_WAY = "no way"  # no route through it, or none whose slowest server is as fast
    NO_ROOM = "no room"  # too little free KV memory, where others have enough
    AVOIDED = "avoided"  # it failed or refused lately, or the session has it already
    BLOCKED = "blocked"  # by `blocked_peers`
    NOT_ALLOWED = "not allowed"  # not among `allowed_peers`
    NOT_TRUSTED = "not trusted"  # `trusted_peers` names others for these blocks
    NOT_ONLINE = "not online"  # it joins or leaves
    NO_ADDRESS = "no address"  # and no anchor: it is behind a router, and has lost its moorings
    OTHER_CLASS = "other class"  # it computes in another numeric class
    OTHER_TIER = "other tier"  # it computes in a class whose numbers are much farther from float32, or much nearer
    NO_CODING = "no coding"  # it takes activations only as they are, and the client asks for a coding
    ELSEWHERE = "elsewhere"  # it holds none of the wanted blocks


class Eligibility:
    """Tells servers that a request may use from those that it may not."""

    def __init__(self, request: Request) -> None:
        allowed = request.preferences.allowed_peers
        self._request = request
        self._blocked = keys_of(request.preferences.blocked_peers)
        self._allowed = None if allowed is None else keys_of(allowed)
        self._avoided = {key_and_process(avoided) for avoided in request.avoid}
        self._others: dict[str, Reason | None] = {}  # why classes may not be in the route

    def usable(self) -> list[SignedAnnouncement]:
        """Return the servers that may be used."""
        return [signed for signed in self._request.servers if self.reason(signed.announcement) is None]

    def reason(self, announcement: Announcement) -> Reason | None:
        """Return why a server may not be used, or None."""
        wanted, key = self._request.wanted, announcement.public_key
        start, stop = announcement.blocks
        if stop <= wanted.start or start >= wanted.stop:
            return Reason.ELSEWHERE
        if (unwanted := self._unwanted(announcement)) is not None:
            return unwanted
        if announcement.state != "online":
            return Reason.NOT_ONLINE
        if not (announcement.addresses or announcement.anchors):
            return Reason.NO_ADDRESS
        if (key, "") in self._avoided or (key, announcement.channel_key) in self._avoided:
            return Reason.AVOIDED
        name = announcement.numeric_class
        if name not in self._others:
            self._others[name] = self._other_class(name)
        if (other := self._others[name]) is not None:
            return other
        return None if self._request.coding in {None, *announcement.codings} else Reason.NO_CODING

    def _unwanted(self, announcement: Announcement) -> Reason | None:
        """Return which of the user's preferences rules a server out."""
        key = announcement.public_key
        if key in self._blocked:
            return Reason.BLOCKED
        if self._allowed is not None and key not in self._allowed:
            return Reason.NOT_ALLOWED
        if self._request.pins and not _runs(announcement, self._request):
            return Reason.NOT_TRUSTED
        return None

    def _other_class(self, name: str) -> Reason | None:
        """Return why a class may not be in the route."""
        request = self._request
        wanted = request.preferences
        is_held = not request.held or any(name == held for _, held in request.held)
        if not _is_class(name) or request.dtype not in {None, name.partition("+")[0]} or (wanted.exact and not is_held):
            return Reason.OTHER_CLASS
        tiers = {tier_of(held) for _, held in request.held} or ({Tier.FULL} if wanted.quality == "full" else None)
        return None if tiers is None or tier_of(name) in tiers else Reason.OTHER_TIER


@dataclass(frozen=True, slots=True)
class Offer:
    """A server, and blocks that it may be given."""

    signed: SignedAnnouncement
    blocks: Blocks

    @property
    def announcement(self) -> Announcement:
        """The server's announcement."""
        return self.signed.announcement


def offers_of(request: Request, servers: Iterable[SignedAnnouncement], held: Held = ()) -> list[Offer]:
    """Return the blocks that these servers may be given; if servers with room cover the wanted blocks, only theirs.

    held: a server gets only blocks of its own numeric class. The planner breaks ties by their order. It depends on the
    client's salt, and not on the order of `servers`.
    """
    offers = [Offer(signed, blocks) for signed in servers for blocks in _runs(signed.announcement, request, held)]
    with_room = [offer for offer in offers if has_room(offer.announcement, request)]
    if len(with_room) < len(offers) and covered(request.wanted, with_room):
        offers = with_room
    place = request.evidence.place
    return sorted(offers, key=lambda o: (place(o.announcement), o.announcement.blocks, o.blocks))


def has_room(announcement: Announcement, request: Request) -> bool:
    """Return whether a server has the free KV memory that the session will need."""
    return announcement.free_tokens >= request.positions_needed


def covered(wanted: Blocks, offers: Sequence[Offer]) -> bool:
    """Return whether every wanted block is offered."""
    return not missing_blocks(wanted, (offer.blocks for offer in offers))


def no_route(request: Request) -> NoRoute:
    """Return the error that names the missing blocks and the reason for which their servers are not used."""
    eligibility = Eligibility(request)
    reasons = [(signed.announcement, eligibility.reason(signed.announcement)) for signed in request.servers]
    usable = [a for a, reason in reasons if reason is None]
    missing = missing_blocks(request.wanted, (blocks for a in usable for blocks in _runs(a, request)))
    if not missing:
        classes = ", ".join(sorted({a.numeric_class for a in usable}))
        one = "numeric class covers them, and exact mixes none" if request.preferences.exact else "tier covers them"
        return NoRoute(request.model, tuple(request.wanted), f"no single {one} ({classes})")

    def held_by(*excused: Reason | None) -> set[str]:
        """Return the classes that would do if these reasons did not count."""
        held = [a for a, reason in reasons if reason in excused]
        return set() if missing_blocks(request.wanted, (a.span for a in held)) else {a.numeric_class for a in held}

    if request.pins and held_by(None, Reason.NOT_TRUSTED):
        return NoRoute(request.model, missing, "only peers serve them that trusted_peers does not name for them")
    if held_by(None, Reason.BLOCKED, Reason.NOT_ALLOWED):
        return NoRoute(request.model, missing, "only peers outside allowed_peers or in blocked_peers serve them")
    kept = ", ".join(sorted({held for _, held in request.held}))
    others = held_by(None, Reason.OTHER_CLASS) - {a.numeric_class for a in usable}
    if others and (kept or request.dtype):
        why = f"nobody serves them in {kept or request.dtype}, but in {', '.join(sorted(others))}"
        return NoRoute(request.model, missing, why + ": pass that as dtype" * (not kept))
    if farther := _in_another_tier(request, [a for a, reason in reasons if reason is Reason.OTHER_TIER]):
        why = f"servers have them only in another tier's classes, {', '.join(farther)}"
        return NoRoute(request.model, missing, why + ': pass quality="any" to take those' * (not request.held))
    if held_by(None, Reason.NO_CODING):
        why = f"their servers run without --wire {request.coding}: leave out wire, or start servers with it"
        return NoRoute(request.model, missing, why)
    if held_by(None, Reason.NO_ADDRESS):
        why = "their servers are behind routers, and no anchor leads to them now"
        return NoRoute(request.model, missing, why, passing=True)
    return NoRoute(request.model, missing)


def _in_another_tier(request: Request, servers: Iterable[Announcement]) -> list[str]:
    """Return the classes of tiers whose servers alone cover the wanted blocks."""
    by_tier: dict[str, list[Announcement]] = defaultdict(list)
    for announcement in servers:
        by_tier[tier_of(announcement.numeric_class)].append(announcement)
    whole = [held for held in by_tier.values() if not missing_blocks(request.wanted, (a.span for a in held))]
    return sorted({a.numeric_class for held in whole for a in held})


def _is_class(name: str) -> bool:
    """Whether a record's class can be asked for: how activations travel is the client's choice."""
    return not NumericClass.parse(name).wire


def _runs(announcement: Announcement, request: Request, held: Held = ()) -> tuple[Blocks, ...]:
    """Return the ranges that a server may be given of its span: all of it where no wanted block is for others only.

    held: the class of the servers that each block is for; () for any class.
    """
    others = [blocks for blocks, name in held if name != announcement.numeric_class]
    if not (request.pins or others):
        return (announcement.span,)
    key, wanted = announcement.public_key, request.wanted
    fit = [
        block
        for block in announcement.span
        if block in wanted
        and not any(block in blocks for blocks in others)
        and all(key in trusted for blocks, trusted in request.pins if block in blocks)
    ]
    runs = [[block for _, block in run] for _, run in groupby(enumerate(fit), lambda pair: pair[1] - pair[0])]
    return tuple(Blocks(run[0], run[-1] + 1) for run in runs)
