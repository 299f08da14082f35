"""Chooses the next tokens of many generations from their logits, together. Pure, given each one's generator.

Order, as in `transformers` where that has the step: bias, penalties, grammar; then temperature, top-k, top-p, min-p.
Every step takes all rows that need it at once, because a batch of 32 would otherwise cost 32 passes over the vocabulary
for each of them. A generation draws one number for each token, and looks it up in its row's cumulative distribution. So
a seed gives the same text in any batch.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.gateway.generation import TEMPERATURE_MIN, Grammar, Likely, Sampling, Token


class Sampler:
    """The state of one generation's sampling."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], grammar: Grammar | None = None) -> None:
        self.sampling = sampling
        self.grammar = grammar
        self.counts: Counter[int] = Counter()  # of the output
        self._bias: tuple[Tensor, Tensor] | None = None  # tokens, and what is added to their logits
        self._seen = list(prompt) if sampling.repetition_penalty != 1 else []  # those that `seen` lacks
        self._was_seen: Tensor | None = None
        self._generator: torch.Generator | None = None
        if sampling.temperature > 0:
            self._generator = torch.Generator()
            if sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(sampling.seed % 2**63)

    @property
    def is_plain(self) -> bool:
        """Whether nothing changes its logits before the temperature."""
        sampling = self.sampling
        return (
            self.grammar is None
            and not sampling.logit_bias
            and sampling.repetition_penalty == 1
            and sampling.presence_penalty == sampling.frequency_penalty == 0
        )

    def bias(self, vocabulary: int) -> tuple[Tensor, Tensor] | None:
        """Return tokens, int64 [tokens], and what is added to their logits; None where nothing is."""
        if self._bias is None and self.sampling.logit_bias:
            known = {token: bias for token, bias in self.sampling.logit_bias.items() if 0 <= token < vocabulary}
            self._bias = torch.tensor(list(known), dtype=torch.int64), torch.tensor(list(known.values()))
        return self._bias

    def seen(self, vocabulary: int) -> Tensor | None:
        """Return which tokens were seen, bool [vocabulary]; None where none counts."""
        if self.sampling.repetition_penalty == 1:
            return None
        if self._was_seen is None:
            self._was_seen = torch.zeros(vocabulary, dtype=torch.bool)
        if self._seen:
            self._was_seen[self._seen] = True
            self._seen.clear()
        return self._was_seen

    def draw(self) -> float:
        """Return the next random number of this generation, in [0, 1)."""
        assert self._generator is not None
        return float(torch.rand((), dtype=torch.float64, generator=self._generator))

    def force(self) -> list[int]:
        """Return the tokens that the grammar leaves no choice of, and note them; none where probabilities are asked."""
        if self.grammar is None or self.sampling.logprobs is not None or self.grammar.is_over:
            return []
        forced = self.grammar.forced()
        for token in forced:
            self.take(token)
        return forced

    def take(self, token: int) -> None:
        """Note a sampled token."""
        sampling = self.sampling
        if sampling.presence_penalty or sampling.frequency_penalty:
            self.counts[token] += 1
        if sampling.repetition_penalty != 1:
            self._seen.append(token)
        if self.grammar is not None:
            self.grammar.take(token)


def choose(logits: Tensor, samplers: Sequence[Sampler]) -> list[Token]:
    """Sample a token for each row of logits, float [rows, vocabulary], and note it in its sampler."""
    scores = logits
    if not all(sampler.is_plain for sampler in samplers):
        scores = logits.clone()
        for row, sampler in zip(scores, samplers, strict=True):
            if not sampler.is_plain:
                _adjust(row, sampler)
    drawing = [index for index, sampler in enumerate(samplers) if sampler.sampling.temperature > 0]
    if len(drawing) == len(samplers):
        ids = _drawn(scores, samplers)
    else:
        ids = scores.argmax(dim=-1).tolist()
        if drawing:
            drawn = _drawn(scores[drawing], [samplers[index] for index in drawing])
            for index, token in zip(drawing, drawn, strict=True):
                ids[index] = token
    for sampler, token in zip(samplers, ids, strict=True):
        sampler.take(token)
    return reported(logits, ids, [sampler.sampling.logprobs for sampler in samplers])


def reported(logits: Tensor, ids: Sequence[int], wanted: Sequence[int | None]) -> list[Token]:
    """Return tokens with the probabilities that are wanted: of these logits, float [tokens, vocabulary]."""
    tokens = [Token(token) for token in ids]
    rows = [index for index, count in enumerate(wanted) if count is not None]
    if not rows:
        return tokens
    logprobs = torch.log_softmax(logits[rows].float(), dim=-1)
    most = max(wanted[index] or 0 for index in rows)
    values, indices = logprobs.topk(min(most, logits.shape[-1]), dim=-1)
    for at, index in enumerate(rows):
        count = wanted[index] or 0
        top = zip(indices[at, :count].tolist(), values[at, :count].tolist(), strict=True)
        tokens[index] = Token(ids[index], float(logprobs[at, ids[index]]), tuple(Likely(*each) for each in top))
    return tokens


def _adjust(row: Tensor, sampler: Sampler) -> None:
    """Apply in place all that depends on one generation's past: row is float [vocabulary]."""
    sampling = sampler.sampling
    if (bias := sampler.bias(len(row))) is not None:
        tokens, added = bias
        row[tokens] += added.to(row.dtype)
    if (seen := sampler.seen(len(row))) is not None:
        penalty = sampling.repetition_penalty
        row.copy_(torch.where(seen, torch.where(row < 0, row * penalty, row / penalty), row))
    if sampler.counts:
        counts = torch.tensor(list(sampler.counts.values()), dtype=row.dtype)
        row[list(sampler.counts)] -= counts * sampling.frequency_penalty + sampling.presence_penalty
    mask = None if sampler.grammar is None else sampler.grammar.mask()
    if mask is not None:
        row.masked_fill_(~mask[: len(row)], -torch.inf)


def _drawn(scores: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Sample from rows whose temperature is above 0."""
    temperatures = torch.tensor([sampler.sampling.temperature for sampler in samplers], dtype=scores.dtype)
    temperatures = temperatures.clamp(min=TEMPERATURE_MIN)
    scores = cut(scores / temperatures[:, None], [sampler.sampling for sampler in samplers])
    cumulative = torch.softmax(scores, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    points = torch.tensor([sampler.draw() for sampler in samplers], dtype=torch.float64) * cumulative[:, -1]
    ids: list[int] = torch.searchsorted(cumulative, points[:, None], right=True)[:, 0].tolist()
    return ids


def cut(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return scores, float [rows, vocabulary], with -inf for the tokens that top-k, top-p and min-p leave out.

    As TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper of `transformers` do one after the other.
    """
    vocabulary = scores.shape[-1]
    top_k = torch.tensor([min(each.top_k, vocabulary) or vocabulary for each in samplings])
    top_p = torch.tensor([each.top_p for each in samplings], dtype=scores.dtype)
    min_p = torch.tensor([each.min_p for each in samplings], dtype=scores.dtype)
    if bool((top_k < vocabulary).any()):
        most = int(top_k[top_k < vocabulary].max())
        least = scores.topk(most, dim=-1).values.gather(1, (top_k.clamp(max=most) - 1)[:, None])
        least = torch.where((top_k < vocabulary)[:, None], least, -torch.inf)
        scores = scores.masked_fill(scores < least, -torch.inf)
    if bool((top_p < 1).any()):
        ordered, order = scores.sort(dim=-1)
        gone = ordered.softmax(dim=-1).cumsum(dim=-1) <= (1 - top_p)[:, None]
        gone &= (top_p < 1)[:, None]
        gone[:, -1] = False
        scores = scores.masked_fill(gone.scatter(1, order, gone), -torch.inf)
    if bool((min_p > 0).any()):
        probabilities = scores.softmax(dim=-1)
        scores = scores.masked_fill(
            probabilities < min_p[:, None] * probabilities.amax(dim=-1, keepdim=True), -torch.inf
        )
    return scores
