"""An anchor's load: as it counts it, as it tells others, and as they ask for it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from swarm.errors import Unreachable
from swarm.limits import limit
from swarm.net.address import ViaAnchor
from swarm.net.lines import Lines
from swarm.protocol.meeting import LOAD, AnchorInquiry, AnchorLoad


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """How often an anchor looks at its load for others, and how long they wait."""

    fresh_s: float = limit(10.0, "s", "one answer is given again for so long, so that it shows no single meeting")
    answer_s: float = limit(4.0, "s", "an anchor that has not told its load by then is left")


@dataclass(slots=True)
class Load:
    """The present and past work of an anchor."""

    moored: int = 0
    calls: int = 0
    refused: int = 0
    meetings: int = 0
    pairs: int = 0
    relayed_bytes: int = 0


class Told:
    """The load as an anchor tells it: the same numbers for a while, and a rate over that while or longer. Pure."""

    def __init__(self, now: float, limits: LoadLimits = LoadLimits()) -> None:
        """now: when the anchor has begun, in the caller's time."""
        self._limits = limits
        self._since, self._relayed_bytes = now, 0
        self._answer: AnchorLoad | None = None

    def answer(self, now: float, look: Callable[[float], AnchorLoad], relayed_bytes: int) -> AnchorLoad:
        """Return the answer of this moment.

        look: makes a new one of the relayed bytes per second. relayed_bytes: since the beginning.
        """
        passed_s = now - self._since
        if self._answer is None or passed_s >= self._limits.fresh_s:
            per_s = (relayed_bytes - self._relayed_bytes) / max(passed_s, self._limits.fresh_s)
            self._answer = look(per_s)
            self._since, self._relayed_bytes = now, relayed_bytes
        return self._answer


async def load_of(anchor: ViaAnchor, lines: Lines, limits: LoadLimits = LoadLimits()) -> AnchorLoad:
    """Ask an anchor for its load, one question at a time. Its numbers are claims. Raises NetworkError."""
    line = await lines.open(anchor)
    try:
        if not line.ready.result().loads:  # it would end the line
            raise Unreachable(anchor.peer, (str(anchor),), 0.0, "as an anchor: its version does not tell its load")
        answer = lines.expect(line, LOAD)
        line.send(AnchorInquiry())
        async with asyncio.timeout(limits.answer_s):
            load = await asyncio.shield(answer)
        assert isinstance(load, AnchorLoad)
        return load
    except TimeoutError:
        why = "as an anchor: it does not tell its load"
        raise Unreachable(anchor.peer, (str(anchor),), limits.answer_s, why) from None
    finally:
        lines.forget(line, LOAD)
        lines.release(line)
