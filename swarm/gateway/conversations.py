"""Sessions that are kept when an answer is finished, for the next turn of the same conversation.

A client sends the whole conversation with every turn. The gateway looks for an idle session that begins with the same
tokens, and sends the new ones alone. The longest common prefix wins; a conversation's key breaks ties. A session is
never continued for another owner. Those that were used longest ago are closed first, when they hold too many tokens
together, when they were idle for too long, and when another session waits for room.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.client.session.session import Session
from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class ConversationLimits:
    """How much of the swarm's memory idle conversations may hold."""

    tokens_max: int = limit(65_536, "tokens", "of all idle sessions of one model together; the oldest are closed")
    sessions_max: int = limit(32, "sessions", "that are idle, of one model; the oldest are closed")
    idle_s: float = limit(300.0, "s", "a session that no turn has continued for so long is closed; 0 keeps none")
    shared_min: int = limit(16, "tokens", "a shorter common prefix saves less than it costs to roll a session back")


@dataclass(slots=True, eq=False)
class Kept:
    """A session with the token ids that every hop has.

    ids: those of the text. Guesses behind them may still be in flight: the next step takes their positions back.
    """

    session: Session
    ids: list[int]
    owner: str
    conversation: str | None
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Match:
    """An idle session, and how many of its positions the new prompt begins with."""

    kept: Kept
    keep: int


class Conversations:
    """The idle sessions of one model."""

    def __init__(self, limits: ConversationLimits, *, rolls_back: bool, now: Callable[[], float]) -> None:
        """rolls_back: whether a session can go back to any position; else only exact continuations match."""
        self._limits = limits
        self._rolls_back = rolls_back
        self._now = now
        self._idle: list[Kept] = []  # the longest idle first

    def __len__(self) -> int:
        return len(self._idle)

    @property
    def tokens(self) -> int:
        """Positions that idle sessions hold."""
        return sum(len(kept.ids) for kept in self._idle)

    def take(self, prompt: Sequence[int], owner: str, conversation: str | None) -> Match | None:
        """Return the idle session that has most of a prompt, and count it as in use; None if none is worth it."""
        best: Match | None = None
        for kept in self._idle:
            if kept.owner != owner:
                continue
            keep = min(common_prefix(kept.ids, prompt), len(prompt) - 1)  # one token at least is computed
            if keep < self._limits.shared_min or (keep < len(kept.ids) and not self._rolls_back):
                continue
            if best is None or self._rank(kept, keep, conversation) > self._rank(best.kept, best.keep, conversation):
                best = Match(kept, keep)
        if best is not None:
            self._idle.remove(best.kept)
        return best

    async def put(self, kept: Kept) -> None:
        """Keep a session until its next turn, and close those that are too much."""
        kept.since = self._now()
        self._idle.append(kept)
        await self.close_old()

    async def close_old(self) -> None:
        """Close the sessions that are over a limit, and those of which a step has failed behind the answer's end."""
        limits = self._limits
        failed = [kept for kept in self._idle if kept.session.error is not None]
        self._idle = [kept for kept in self._idle if kept not in failed]  # before another call sees them, too
        for kept in failed:
            await kept.session.close()
        while self._idle and (
            self.tokens > limits.tokens_max
            or len(self._idle) > limits.sessions_max
            or self._now() - self._idle[0].since >= limits.idle_s
        ):
            await self.close_oldest()

    async def close_oldest(self) -> bool:
        """Close the session that is idle for longest. Returns whether there was one."""
        if not self._idle:
            return False
        await self._idle.pop(0).session.close()
        return True

    async def close(self) -> None:
        """Close all."""
        while await self.close_oldest():
            pass

    @staticmethod
    def _rank(kept: Kept, keep: int, conversation: str | None) -> tuple[int, bool, float]:
        """Order matches: most positions first, then the conversation's own, then the least that is thrown away."""
        own = conversation is not None and kept.conversation == conversation
        return keep, own, -float(len(kept.ids) - keep)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with in common."""
    low, high = 0, min(len(a), len(b))
    if list(a[:high]) == list(b[:high]):
        return high
    while high - low > 1:  # they agree before `low`, and differ somewhere before `high`
        middle = (low + high) // 2
        if list(a[low:middle]) == list(b[low:middle]):
            low = middle
        else:
            high = middle
    return low
