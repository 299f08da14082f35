"""A find call as its two sides see it: the wire form of a look, and what an answer says. No hivemind, no libp2p."""

from collections.abc import Sequence
from typing import Any

from swarm.blocks import BLOCKS_MAX
from swarm.dht import messages
from swarm.dht.format import believe, believe_sample, peers_named
from swarm.dht.sampling import SAMPLING, Ask, Found, Look
from swarm.dht.validator import RecordGate
from swarm.errors import InvalidMessage


def request_of(asks: Sequence[Ask], node_id: bytes = b"") -> Any:  # noqa: ANN401 - a protobuf message
    """Return the request for some keys. node_id: of a node that others may learn."""
    looks = [messages.Look(**look._asdict()) for _, look in asks if look is not None]
    request = messages.FindRequest(keys=[key for key, _ in asks], looks=looks if len(looks) == len(asks) else [])
    if node_id:
        request.peer.node_id = node_id
    return request


def looks_of(request: Any) -> list[Look | None]:  # noqa: ANN401 - a protobuf message
    """Return what a request wants of each of its keys. Raises InvalidMessage."""
    if not request.looks:
        return [None] * len(request.keys)
    too_long = any(len(look.salt) > 32 or len(look.blocks) > BLOCKS_MAX // 8 for look in request.looks)
    no_slice = any(look.parts > SAMPLING.parts_max or look.part >= max(1, look.parts) for look in request.looks)
    if len(request.looks) != len(request.keys) or too_long or no_slice:
        raise InvalidMessage("find request", "samples that do not fit its keys")
    return [
        Look(
            look.salt,
            look.part,
            look.parts,
            look.size,
            look.whole,
            look.named,
            look.within,
            look.seen[: 3 * SAMPLING.seen_max],
            look.below,
            look.blocks,
        )
        for look in request.looks
    ]


async def found_in(gate: RecordGate, key: bytes, result: Any, asked: int) -> Found:  # noqa: ANN401 - a protobuf message
    """Return one node's answer about one key, with the records that hold. asked: bytes of the request for it."""
    near = peers_named(result.nearest_peer_ids)
    if result.packed:
        entries = await believe_sample(gate, key, result.packed)
    else:
        entries = await believe(gate, key, result.value) if result.type == messages.FOUND_DICTIONARY else []
    return Found(entries, near, max(result.held, len(entries)), asked + result.ByteSize())
