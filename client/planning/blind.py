"""Routes drawn without a look at claims, for audits: a server that boasts must not draw its own auditors. Pure."""

from dataclasses import replace
from random import Random

from swarm.client.planning.costs import estimated
from swarm.client.planning.evidence import Evidence, key_of
from swarm.client.planning.plan import plan
from swarm.client.planning.request import Request
from swarm.client.planning.route import Hop, Route
from swarm.dht.records import Announcement, SignedAnnouncement


def plan_blindly(request: Request, random: Random) -> Route:
    """Return a route in which speeds, queues and round trips play no part: each server's speed is drawn.

    A hop costs as much as four blocks on average: of few hops it is likelier that all compute what they should. Raises
    NoRoute, as `plan`.
    """
    drawn = [_drawn(signed.announcement, request, random) for signed in request.servers]
    blindfold = replace(
        request,
        servers=tuple(
            SignedAnnouncement(claim, signed.data) for claim, signed in zip(drawn, request.servers, strict=True)
        ),
        preferences=replace(request.preferences, optimize="latency"),
        client_rtts={},
        evidence=Evidence(blocks={key_of(announcement): 0.0 for announcement in drawn}),
        limits=replace(request.limits, unknown_rtt_ms=0.0),
    )
    real = {(*key_of(signed.announcement), signed.announcement.blocks): signed for signed in request.servers}
    hops = [Hop(real[*key_of(hop.announcement), hop.announcement.blocks], hop.blocks) for hop in plan(blindfold)]
    return estimated(hops, request)


def _drawn(announcement: Announcement, request: Request, random: Random) -> Announcement:
    """Return an announcement that claims a drawn speed and nothing else that a route depends on."""
    block_ms = request.limits.hop_ms * (0.5 + random.random()) / 4
    tokens_per_s = 1000.0 / block_ms / len(announcement.span)
    return announcement.model_copy(update={"decode_tps": tokens_per_s, "load": 0.0, "rtts": ()})
