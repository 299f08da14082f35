"""What a message was worth, until channels take it from the handler themselves."""

from collections.abc import Callable
from dataclasses import dataclass

from swarm.activations import Activations
from swarm.net.channel import Channel, OnMessage
from swarm.protocol.messages import AnyMessage


@dataclass(frozen=True, slots=True)
class Toll:
    """What a message was worth, as the handler that took it judges. The channel charges it, once."""

    idle: bool = False  # it moved no session forward: one unit and its tensors' bytes are charged
    free_bytes: int = 0  # of a decode step that was accepted: these bytes are given back
    payer: Channel | None = None  # pays instead of the channel that brought it


PROGRESS = Toll()
IDLE = Toll(idle=True)

Take = Callable[[Channel, AnyMessage, Activations | None], Toll]


def charged(take: Take) -> OnMessage:
    """Return a handler that charges channels itself."""

    def on_message(channel: Channel, message: AnyMessage, activations: Activations | None) -> None:
        toll = take(channel, message, activations)
        if toll.idle:
            (toll.payer or channel).note_chatter(activations)
        if toll.free_bytes:
            channel.note_decode(toll.free_bytes)

    return on_message
