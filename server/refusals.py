"""Refusals of a server as values, and the way it sends messages."""

from dataclasses import dataclass

import structlog

from swarm.activations import Activations
from swarm.errors import ChannelClosed
from swarm.net.channel import Channel
from swarm.protocol.attest import Attest
from swarm.protocol.base import TEXT_MAX, Message
from swarm.protocol.messages import Inquiry, Open, Rebuild, RefusalCode, Refused, Replay, Reroute, Step

_log = structlog.get_logger("swarm.server")


@dataclass(frozen=True, slots=True)
class Declined:
    """A request is not carried out, and nothing of it was applied. retry_after_s: None for one not to come again."""

    code: RefusalCode
    why: str
    retry_after_s: float | None = None

    def answer(self, request: Open | Reroute | Replay | Inquiry | Attest | Rebuild | Step) -> Refused:
        """Return the message that says so."""
        return Refused(
            session=request.session,
            epoch=request.epoch,
            step=request.step if isinstance(request, Step) else None,
            code=self.code,
            why=self.why[:TEXT_MAX],
            retry_after_ms=None if self.retry_after_s is None else int(self.retry_after_s * 1000),
        )


def send(channel: Channel, message: Message, activations: Activations | None = None, *, soon: bool = False) -> None:
    """Send, unless the channel has just ended: then the callback of its end takes over.

    soon: at the end of this turn of the loop, perhaps in one frame with others.
    """
    try:
        channel.send(message, activations, soon=soon)
    except ChannelClosed as error:
        _log.debug("not sent", kind=message.__class__.__name__, why=error.why)
