"""A hop's view of a marked prompt (`swarm.protocol.marks`): which blocks of it are computed. Pure."""

from collections.abc import Hashable
from dataclasses import dataclass

from swarm.protocol.messages import Rebuild, Step


@dataclass(slots=True)
class Marked:
    """A session's progress along its marked prompt, at one hop.

    size: positions of a block; keys: of the blocks. epoch: of the Open: after a reroute, activations may come from
    other hops than those that the tags name. stop: positions that the session has, all of the prompt; None until its
    first step says how many of those that the hop held stay.
    """

    size: int
    keys: tuple[Hashable, ...]
    epoch: int
    stop: int | None = None

    def take(self, message: Step | Rebuild) -> range | None:
        """Go on with a message that the session has accepted.

        Returns the indices of the blocks that it completes; None if it does not go on with the prompt, or the prompt
        is over.
        """
        if not isinstance(message, Step) or message.epoch != self.epoch or message.keep != self.stop:
            return None
        assert message.hidden is not None, "a skipped step is never computed"
        rows, tokens, *_ = message.hidden.shape
        if rows != 1 or message.rows is not None or message.positions is not None or message.mask is not None:
            return None
        self.stop = message.keep + tokens
        blocks = range(message.keep // self.size, min(self.stop // self.size, len(self.keys)))
        return blocks if message.keep // self.size < len(self.keys) else None
