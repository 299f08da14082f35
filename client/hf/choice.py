"""The token that `generate()` is about to choose, from bounds of its logits. Pure.

Greedy decoding takes the highest score. Sampling, `torch.multinomial(p, 1)` on a CPU, is a race of exponentials: it
draws q for each token, and takes the largest p / q. That is the largest of score - log(q), because all tokens share the
softmax's denominator. So both are the largest of something that has bounds. A token is chosen if its lower bound beats
the upper bounds of all others; the head computes the rows that may still win more exactly, twice at most. Where that
does not decide, the caller computes all logits.

Processors that change each score by itself, and keep the scores' order, take bounds to bounds: penalties for
repetition, temperature, tokens that are not allowed. Top-k keeps a token surely or perhaps, by how many others may be
above it; top-p behind it does so by the least and the most mass above the token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.generation import logits_process as stock

from swarm.limits import limit
from swarm.model.bounded import Bounds


@dataclass(frozen=True, slots=True)
class ChoiceLimits:
    """When bounds decide, and how much may be computed for it."""

    leaders: int = limit(8, "rows", "computed first, because a high lower bound leaves few others")
    rows_max: int = limit(512, "rows", "of a small vocabulary; more of them, and all logits are computed")
    rows_share: float = limit(1 / 16, "of the vocabulary", "more rows, and all logits are computed")
    top_k_max: int = limit(1024, "tokens", "a larger top-k is left to the exact head: sums in float32 would err more")
    race_margin: float = limit(1e-4, "log(p / q)", "a closer race is run by the exact head: float32 errs by 2e-5")
    mass_margin: float = limit(5e-4, "probability", "a token so near to top-p's border is neither in nor out")
    noise_min: float = limit(1e-30, "", "a smaller draw lets a token win whose probability is no normal number")


class Rows(Protocol):
    """A head of which any row has bounds."""

    def bounds(self, hidden: Tensor) -> Bounds | None:
        """As `BoundedHead.bounds`."""
        ...

    def narrow(self, hidden: Tensor, rows: Tensor) -> Bounds:
        """As `BoundedHead.narrow`."""
        ...


@dataclass(frozen=True, slots=True)
class Rule:
    """How logits become a token. each: processors of single scores. top_k, top_p: None where nothing is cut off."""

    each: tuple[stock.LogitsProcessor, ...] = ()
    top_k: int | None = None
    top_p: float | None = None
    is_drawn: bool = False

    def scores(self, ids: Tensor, bounds: Bounds) -> Bounds:
        """Return the bounds behind the processors, float32 [vocabulary]. ids: the text, int64 [1, positions]."""
        low, high = bounds.low[None], bounds.high[None]
        for processor in self.each:
            low, high = processor(ids, low), processor(ids, high)
        return Bounds(low[0], high[0])


def rule_of(
    processors: Sequence[stock.LogitsProcessor],
    *,
    is_drawn: bool,
    limits: ChoiceLimits = ChoiceLimits(),
) -> Rule | None:
    """Return the rule of a call's processors; None where one of them, or their order, is not known here."""
    single = (
        stock.MinLengthLogitsProcessor,
        stock.MinNewTokensLengthLogitsProcessor,
        stock.RepetitionPenaltyLogitsProcessor,
        stock.SuppressTokensAtBeginLogitsProcessor,
        stock.SuppressTokensLogitsProcessor,
        stock.TemperatureLogitsWarper,
    )
    top_k, top_p = stock.TopKLogitsWarper, stock.TopPLogitsWarper
    rule = Rule(is_drawn=is_drawn)
    for each in processors:
        kind = type(each)  # a subclass may do anything
        if kind in single and rule.top_k is None:
            rule = replace(rule, each=(*rule.each, each))
            continue
        warper: Any = each
        if kind not in {top_k, top_p} or warper.filter_value != -torch.inf:
            return None
        if kind is top_k and is_drawn and rule.top_k is None and warper.top_k <= limits.top_k_max:
            rule = replace(rule, top_k=warper.top_k)
        elif kind is top_p and rule.top_k is not None and rule.top_p is None and warper.min_tokens_to_keep <= 1:
            rule = replace(rule, top_p=warper.top_p)
        else:
            return None
    return rule


@dataclass(frozen=True, slots=True)
class Chosen:
    """The token of the exact head, or None where bounds do not decide. rows: those that were computed exactly."""

    token: int | None
    rows: int


def choose(
    head: Rows,
    hidden: Tensor,
    ids: Tensor,
    rule: Rule,
    noise: Tensor | None = None,
    limits: ChoiceLimits = ChoiceLimits(),
) -> Chosen:
    """Choose the token behind a hidden state, [1, hidden_size].

    ids: the text, int64 [1, positions]. noise: what is about to be drawn, float32 [vocabulary]; None without sampling.
    """
    bounds = head.bounds(hidden)
    if bounds is None or (noise is not None and not float(noise.min()) > limits.noise_min):
        return Chosen(None, 0)
    rush = None if noise is None else -noise.double().log()
    most = max(limits.rows_max, int(limits.rows_share * len(bounds.low)))
    is_narrow = torch.zeros(len(bounds.low), dtype=torch.bool)
    for choosing in (_leaders, _contenders):
        rows = choosing(rule.scores(ids, bounds), rush, rule, limits)
        rows = rows[~is_narrow[rows]]
        if len(rows) > most:
            return Chosen(None, int(is_narrow.sum()))
        if len(rows):
            narrow = head.narrow(hidden, rows)
            bounds.low[rows], bounds.high[rows] = narrow.low, narrow.high
            is_narrow[rows] = True
    return Chosen(_winner(rule.scores(ids, bounds), rush, rule, limits), int(is_narrow.sum()))


def _leaders(scores: Bounds, rush: Tensor | None, rule: Rule, limits: ChoiceLimits) -> Tensor:
    """Return the rows with the highest lower bounds: most of the others cannot reach those."""
    keys = scores.low if rush is None else scores.low + rush
    rows = keys.topk(min(limits.leaders, len(keys))).indices
    if rule.top_k is None:
        return rows
    all_rows: Tensor = torch.cat([rows, scores.low.topk(min(rule.top_k, len(keys))).indices]).unique()
    return all_rows


def _contenders(scores: Bounds, rush: Tensor | None, rule: Rule, limits: ChoiceLimits) -> Tensor:
    """Return all rows that may be chosen, or that say which may be."""
    if rule.top_k is not None:
        return (scores.high >= _kth(scores.low, rule.top_k)).nonzero()[:, 0]
    if rush is None:
        return (scores.high >= scores.low.max()).nonzero()[:, 0]
    return (scores.high + rush >= (scores.low + rush).max() - limits.race_margin).nonzero()[:, 0]


def _winner(scores: Bounds, rush: Tensor | None, rule: Rule, limits: ChoiceLimits) -> int | None:
    if rush is None:
        return _highest(scores)
    rows = torch.arange(len(rush))
    is_sure = torch.ones(len(rush), dtype=torch.bool)
    if rule.top_k is not None:
        rows = (scores.high >= _kth(scores.low, rule.top_k)).nonzero()[:, 0]
        scores = Bounds(scores.low[rows], scores.high[rows])
        is_sure = _may_be_above(scores) < rule.top_k
        if rule.top_p is not None:
            if len(rows) > 2 * limits.top_k_max:  # ties: of each pair there is a number
                return None
            may, is_sure = _nucleus(scores, is_sure, rule.top_p, limits.mass_margin)
            rows, is_sure, scores = rows[may], is_sure[may], Bounds(scores.low[may], scores.high[may])
        rush = rush[rows]
    low, high = scores.low + rush, scores.high + rush
    if not bool(is_sure.any()):
        return None
    best = int(torch.where(is_sure, low, -torch.inf).argmax())
    is_close = high >= low[best] - limits.race_margin
    is_close[best] = False
    return None if bool(is_close.any()) or not bool(low[best].isfinite()) else int(rows[best])


def _highest(scores: Bounds) -> int | None:
    """Return the row of the largest score. Of equal ones torch takes the first."""
    best = int(scores.low.argmax())
    least = scores.low[best]
    may_win = scores.high > least
    may_win[:best] |= scores.high[:best] == least
    may_win[best] = False
    return None if bool(may_win.any()) or not bool(least.isfinite()) else best


def _may_be_above(scores: Bounds) -> Tensor:
    """Return for each row how many others may be above it, int64 [rows]."""
    ordered = scores.high.sort().values
    above = len(ordered) - torch.searchsorted(ordered, scores.low, right=True)
    return above - (scores.high > scores.low).long()  # itself


def _kth(values: Tensor, k: int) -> Tensor:
    return values.topk(min(k, len(values))).values[-1]


def _nucleus(scores: Bounds, is_in: Tensor, top_p: float, margin: float) -> tuple[Tensor, Tensor]:
    """Return which tokens top-p may keep, and which ones it keeps surely; bool [tokens] each.

    It keeps a token if those above it have less than top_p of the mass. scores, is_in: of all tokens that top-k may
    keep, and those that it keeps surely.
    """
    low, high = scores.low.double(), scores.high.double()
    least, most = (low - high.max()).exp(), (high - high.max()).exp()
    others = ~torch.eye(len(low), dtype=torch.bool)
    may_be_above = (high[None] >= low[:, None]) & others  # [token, other]
    is_above = (low[None] > high[:, None]) & is_in
    most_above = (may_be_above * most).sum(1)
    least_below = ((~may_be_above & others & is_in) * least).sum(1) + least
    least_above = (is_above * least).sum(1)
    most_below = (~is_above * most).sum(1)
    may = least_above / (least_above + most_below) < top_p + margin
    is_sure = is_in & (most_above / (most_above + least_below) < top_p - margin)
    return may, is_sure
