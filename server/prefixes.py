"""Beginnings of prompts that this server has computed, kept so that their owner's next session need not send them.

    Open with marks     -> begin    the session gets the blocks that are there, and pays for them as for its own
    Step                -> mark     its task cuts blocks that are not kept yet out of the session's past
    the step's output   -> keep     the blocks go to the shelf

Only what this server has computed itself is kept, for the peer whose session it was, while the session's seat is the
one that its marks were made for: after a reroute, activations may come from another hop, whose faults the tags do not
name. Blocks take memory of the KV pool that no session needs: they are dropped before any session is refused.
"""

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass

from swarm.compute.task import Forward
from swarm.model.prefix import Cutting, PastBlock, can_share
from swarm.protocol.marked import Marked
from swarm.protocol.messages import Open, Rebuild, Step
from swarm.server.holdings import Memory
from swarm.server.limits import PrefixLimits
from swarm.server.session import HostedSession
from swarm.server.shelf import Shelf


@dataclass(slots=True, kw_only=True)
class Keeping(Cutting):
    """Blocks of one session on their way to the shelf. keys: of the prompt's blocks; indices: of those that are cut."""

    keys: tuple[Hashable, ...]
    indices: tuple[int, ...]


@dataclass(slots=True)
class Counts:
    """Positions since the start: of marked prompts, and of these the ones that no session had to compute.

    hits: sessions that did not have to.
    """

    asked: int = 0
    reused: int = 0
    hits: int = 0


class Prefixes:
    """Those of one server. Lives in the event loop."""

    def __init__(self, memory: Memory, limits: PrefixLimits) -> None:
        self.counts = Counts()
        self._shelf: Shelf[PastBlock] = Shelf()
        self._memory = memory
        self._limits = limits
        memory.cache.give_way = self.give_way

    @property
    def tokens(self) -> int:
        """Of the cache that the blocks take."""
        return self._shelf.tokens

    def begin(self, session: HostedSession, request: Open, now: float) -> int:
        """Let a new session begin with what is kept of its prompt. Returns how many positions that are.

        now: the loop's time, seconds.
        """
        marks, span, plain = request.marks, session.span, request.batch == 1 and not request.after_step
        if marks is None or request.rebuild or not plain or not self._limits.pool_share or not can_share(span):
            return 0
        tags = marks.tags[: (session.positions_max - 1) // marks.size]
        place = f"{span.blocks}/{marks.size}"
        keys = tuple(_key(f"{place}/{index}/{tag}") for index, tag in enumerate(tags))
        blocks = self._shelf.find(session.owner.peer, keys, now)
        held = len(blocks) * marks.size
        if held and not session.begin_with(blocks, held):
            held = 0
        session.tenure.marked = Marked(marks.size, keys, request.epoch)
        self.counts.asked += len(tags) * marks.size
        return held

    def mark(self, session: HostedSession, message: Step | Rebuild, task: Forward) -> None:
        """Have the task of a message that a marked session has accepted cut the blocks that are not kept."""
        marked = session.tenure.marked
        assert marked is not None
        if marked.stop is None and isinstance(message, Step):
            marked.stop = message.keep
            self.counts.reused += message.keep
            self.counts.hits += message.keep > 0
            session.begun(message.keep)
        completed = marked.take(message)
        if completed is None:
            session.tenure.marked = None
            return
        keys = marked.keys[: completed.stop]
        missing = self._shelf.missing(session.owner.peer, keys)
        indices = tuple(index for index in missing if index in completed)
        if indices:
            bounds = tuple((index * marked.size, (index + 1) * marked.size) for index in indices)
            task.cutting = Keeping(bounds, keys=keys, indices=indices)

    def keep(self, session: HostedSession, cutting: Cutting, now: float) -> None:
        """Keep the blocks that a task has cut. now: the loop's time, seconds."""
        assert isinstance(cutting, Keeping)
        if not cutting.blocks:
            return  # they cannot be cut
        start, stop = cutting.bounds[0]
        tokens = self._memory.prices.tokens(1, stop - start, 0)
        new = dict(zip(cutting.indices, cutting.blocks, strict=True))
        self._shelf.put(session.owner.peer, cutting.keys, new, tokens, now)
        self.give_way()

    def sweep(self, now: float) -> None:
        """Drop the blocks that no session has used for long. now: the loop's time, seconds."""
        self._shelf.forget(now - self._limits.idle_s)
        self._memory.cache.lent = self._shelf.tokens

    def give_way(self) -> None:
        """Take no more than this server's share of the pool, and none that sessions need."""
        cache = self._memory.cache
        self.trim(max(0, min(int(cache.capacity * self._limits.pool_share), cache.capacity - cache.used)))

    def trim(self, tokens_max: int) -> None:
        """Drop blocks until they take no more than so many tokens of the cache."""
        self._shelf.trim(tokens_max)
        self._memory.cache.lent = self._shelf.tokens


def _key(text: str) -> bytes:
    """Name a block in 16 bytes: a session's names are charged to nobody."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
