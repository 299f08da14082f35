"""One iteration's batch, chosen from the tasks that are ready. Pure.

Decode steps come first, whole, of every peer in turn: of one token, or a window of several. Prefill fills up the
iteration's budget in pieces, and peers share it evenly.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.compute.limits import BatchLimits


@dataclass(frozen=True, slots=True)
class Ready:
    """A task at the head of its session's queue.

    owner: the peer whose share it takes. group: tasks of different groups cannot run together. tokens: positions that
    are left, of each of `rows` rows. packs: whether it can run with others at all. cuts: whether it can run in pieces.
    decodes: whether it is a decode step, as `BatchLimits.decodes` said when it became the head; it is never cut.
    """

    owner: str
    group: object
    rows: int
    tokens: int
    packs: bool = True
    cuts: bool = True
    decodes: bool = False


@dataclass(frozen=True, slots=True)
class Slice:
    """The next `tokens` positions of the ready task number `index`."""

    index: int
    tokens: int


def form_batch(ready: Sequence[Ready], prefill_tokens: int, limits: BatchLimits) -> list[Slice]:
    """Choose the slices of the next iteration: never none if any task is ready.

    ready: in the order of their turns; a session is in it once.
    prefill_tokens: the budget. Unless it is 0, one position of all rows of the first prefill goes even if that is more:
    the scheduler keeps the excess as a debt.
    """
    if not ready:
        return []
    first = ready[0]
    if len(ready) == 1 or not first.packs:
        return [Slice(0, _piece(first, prefill_tokens))]
    together = [i for i, task in enumerate(ready) if task.packs and task.group == first.group]
    decodes, prefills = list[int](), list[int]()
    for index in together:
        (decodes if ready[index].decodes else prefills).append(index)
    chosen = _decodes(ready, decodes, limits.decode_tokens_max)
    return chosen + _prefills(ready, prefills, prefill_tokens, limits.piece_tokens_min, beside=bool(chosen))


def _decodes(ready: Sequence[Ready], indices: Sequence[int], room: int) -> list[Slice]:
    chosen: list[Slice] = []
    for index in _in_turn(ready, indices, lambda step: step.tokens):
        step = ready[index]
        if room < step.rows * step.tokens and chosen:
            break
        chosen.append(Slice(index, step.tokens))
        room -= step.rows * step.tokens
    return chosen


def _prefills(
    ready: Sequence[Ready], indices: Sequence[int], budget: int, piece_tokens_min: int, *, beside: bool
) -> list[Slice]:
    """Share the budget out. beside: whether decode steps run in the same batch."""
    share = max(piece_tokens_min, budget // max(1, len({ready[i].owner for i in indices})))
    chosen: list[Slice] = []
    left = budget
    for index in _in_turn(ready, indices):
        tokens = _piece(ready[index], min(share, left))
        owes = not chosen and (budget > 0 or not beside)
        if tokens * ready[index].rows > left and not owes:
            continue
        chosen.append(Slice(index, tokens))
        left -= tokens * ready[index].rows
    for at, piece in enumerate(chosen):  # parts of shares that their peers cannot use
        task = ready[piece.index]
        more = min(task.tokens - piece.tokens, max(0, left) // task.rows)
        chosen[at] = Slice(piece.index, piece.tokens + more)
        left -= more * task.rows
    return chosen


def _piece(task: Ready, tokens: int) -> int:
    """Positions that a piece of about so many tokens has."""
    return min(task.tokens, max(1, tokens // task.rows)) if task.cuts and not task.decodes else task.tokens


def _in_turn(ready: Sequence[Ready], indices: Sequence[int], weight: Callable[[Ready], int] = lambda _: 1) -> list[int]:
    """Put the first of every peer before the second of any; within that, as they come.

    weight: so many places of its peer's does a task take.
    """
    seen: dict[str, int] = defaultdict(int)
    ranked = []
    for index in indices:
        ranked.append((seen[ready[index].owner], index))
        seen[ready[index].owner] += weight(ready[index])
    return [index for _, index in sorted(ranked)]
