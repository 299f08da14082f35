"""The head of a distributed model: exact, in int8, or computed in 8 bits where that proves the exact head's token.

`generate()` takes logits from the head, changes them, and chooses. Within it the head does not compute: it notes its
input and returns NaN. The processors, which come next, know the whole text and what is drawn. They choose by bounds
(`swarm.client.hf.choice`) and return scores of which one is finite. Where bounds do not decide, they call the family's
own head with the noted input, and go on as ever. So the tokens and the state of the random numbers are those of the
exact head. Everything else that calls the head gets the exact logits: hand-written loops, beam search, drafts.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import structlog
import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedModel

from swarm.client.hf.choice import Rule, choose, rule_of
from swarm.client.hf.hollow import HollowModel
from swarm.client.hf.rounded import round_ends
from swarm.model.bounded import BoundedHead, Bounds, unfit
from swarm.model.ends import replace_blocks
from swarm.model.integer import nothing
from swarm.model.traits import Traits

HeadMode = Literal["exact", "auto", "int8"]

_log = structlog.get_logger("swarm.head")


@dataclass(slots=True)
class HeadFacts:
    """How a model's head computes, and how often 8 bits decided. Printed, it is a line.

    why_exact: why it has no 8 bits; None if it has. n_bytes: of the exact weight. int8_bytes: of its copy.
    prepared_s: to make the copy. proven: tokens that bounds decided. whole: tokens that took all logits. rows: computed
    exactly for the former. embedding_bytes: of embeddings beside a head that is int8 itself, with no exact one; 0 where
    they are the same.
    """

    n_bytes: int
    embedding_bytes: int | None = None
    why_exact: str | None = None
    int8_bytes: int = 0
    prepared_s: float = 0.0
    proven: int = 0
    whole: int = 0
    rows: int = 0

    def __str__(self) -> str:
        if self.embedding_bytes == 0:
            return f"head and embeddings: int8, {self.n_bytes / 1e6:,.1f} MB"
        if self.embedding_bytes is not None:
            return f"head: int8, {self.n_bytes / 1e6:,.1f} MB; embeddings: {self.embedding_bytes / 1e6:,.1f} MB"
        exact = f"head: exact, {self.n_bytes / 1e6:,.1f} MB"
        if self.why_exact is not None:
            return f"{exact} ({self.why_exact})"
        return (
            f"{exact}; int8, {self.int8_bytes / 1e6:,.1f} MB, made in {self.prepared_s:.1f} s: "
            f"{self.proven} tokens by int8, {self.whole} by the exact head"
        )


class _Call(threading.local):
    """What the running `generate()` of a thread has its head do."""

    decides = False  # its processors choose by bounds
    is_next = False  # the next call of the head is its own, and not one of a streamer or stopping criterion
    input: Tensor | None = None  # of the head's latest call, if it computed nothing


class DecidedHead:
    """The 8 bits of one model's head, and what its threads are at."""

    def __init__(self, bounded: BoundedHead, facts: HeadFacts) -> None:
        self.facts = facts
        self._bounded = bounded
        self._version = bounded.weight._version
        self._call = _Call()
        self._generator = torch.Generator()
        self._drawing = threading.Lock()

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """While the block runs, the head leaves logits of `generate()` in this thread to `BoundedProcessors`."""
        self._call.decides = self._call.is_next = True
        try:
            yield
        finally:
            self._call.decides = self._call.is_next = False
            self._call.input = None

    def expect(self) -> None:
        """The next call of the head in this thread is that of `generate()`, if one runs."""
        self._call.is_next = self._call.decides

    def leaves(self, head: nn.Linear, input: Tensor) -> bool:
        """Note the head's input. Returns whether the logits are left to the processors."""
        call, bounded = self._call, self._bounded
        is_next, call.is_next, call.input = call.is_next, False, None
        is_same = head.weight is bounded.weight and head.weight._version == self._version
        is_plain = input.dim() == 3 and input.shape[0] == 1 and input.dtype == head.weight.dtype
        is_here = input.device.type == head.weight.device.type == "cpu"
        if not (is_next and is_same and is_plain and is_here and _adds_up_in_float32()):
            return False
        call.input = input
        return True

    def noted(self) -> Tensor | None:
        """Return the input of the head's latest call in this thread, once; None where it computed."""
        noted, self._call.input, self._call.is_next = self._call.input, None, False
        return noted

    def choose(self, input: Tensor, ids: Tensor, rule: Rule) -> int | None:
        """Return the token behind the last position of the head's input, [1, tokens, hidden_size]; None if unsure."""
        chosen = choose(self._bounded, input[0, -1:], ids, rule, self._drawn() if rule.is_drawn else None)
        if chosen.token is None:
            self.facts.whole += 1
        else:
            self.facts.proven += 1
            self.facts.rows += chosen.rows
        return chosen.token

    def _drawn(self) -> Tensor:
        """Return what `torch.multinomial` draws next, float32 [vocabulary]. The caller's generator is only read."""
        with self._drawing:
            self._generator.set_state(torch.get_rng_state())
            return torch.empty(1, len(self._bounded.weight)).exponential_(1, generator=self._generator)[0]


class DecidedLinear(nn.Linear):
    """A head that may leave its logits to the processors. Made of an `nn.Linear` by `prepare_head`."""

    decided: tuple[DecidedHead]  # no submodule

    def forward(self, input: Tensor) -> Tensor:
        """Multiply; [..., hidden_size] -> [..., vocabulary]. NaN where the processors choose by themselves."""
        if self.decided[0].leaves(self, input):
            return nothing(torch.Size((*input.shape[:-1], self.out_features)), input.dtype)
        return self.whole(input)

    def whole(self, input: Tensor) -> Tensor:
        """Multiply, whoever calls."""
        return super().forward(input)


class BoundedProcessors(LogitsProcessorList):
    """The processors of one call of `generate()`. Where bounds decide they are not called."""

    def __init__(self, processors: LogitsProcessorList, rule: Rule, head: DecidedLinear) -> None:
        super().__init__(processors)
        self._rule = rule
        self.head = head

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:  # noqa: ANN401
        """Return scores of which the chosen token alone is finite, or the processed scores of the exact head.

        input_ids: [1, positions]. scores: float32 [1, vocabulary].
        """
        decided = self.head.decided[0]
        input = decided.noted()
        if input is not None:
            token = decided.choose(input, input_ids, self._rule)
            if token is not None:
                chosen = torch.full_like(scores, -torch.inf)
                chosen[0, token] = 0.0
                return chosen
            scores = self.head.whole(input)[:, -1].to(copy=True, dtype=scores.dtype)
        processed: Tensor = super().__call__(input_ids, scores, **kwargs)  # type: ignore[arg-type]  # types of old names
        return processed


class HeadedModel(HollowModel):
    """The additions of a model whose head may be decided by bounds. Mixed in before the family's class."""

    _facts: HeadFacts | None = None

    @property
    def head_facts(self) -> HeadFacts:
        """Bytes of the head, and how often 8 bits decided. Printed, it is a line."""
        if self._facts is None:
            return HeadFacts(_bytes_of(self._own_head()))
        return replace(self._facts)

    def _own_head(self) -> nn.Module | None:
        head: nn.Module | None = self.get_output_embeddings()  # type: ignore[no-untyped-call]
        return head

    def _sample(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as `transformers` has it
        """Do as `transformers` does, with the head in 8 bits where bounds can decide."""
        processors = self._bounded_processors(input_ids, kwargs)
        if processors is None:
            return super()._sample(input_ids, *args, **kwargs)  # type: ignore[misc]
        with processors.head.decided[0].deciding():
            return super()._sample(input_ids, *args, **{**kwargs, "logits_processor": processors})  # type: ignore[misc]

    def _has_unfinished_sequences(self, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401 - as `transformers` has it
        """Do as `transformers` does. The loop of `_sample` asks before each forward."""
        unfinished: bool = super()._has_unfinished_sequences(*args, **kwargs)  # type: ignore[misc]
        head = self._own_head()
        if unfinished and isinstance(head, DecidedLinear):
            head.decided[0].expect()
        return unfinished

    def _bounded_processors(self, ids: Tensor, kwargs: dict[str, Any]) -> BoundedProcessors | None:
        """Return processors that choose by bounds; None for a call that gets all logits."""
        head, config = self._own_head(), kwargs["generation_config"]
        if not isinstance(head, DecidedLinear) or ids.shape[0] != 1 or ids.device.type != "cpu":
            return None
        if config.output_scores or config.output_logits or self._forward_hooks or head._forward_hooks:
            return None  # logits are looked at
        rule = rule_of(kwargs["logits_processor"], is_drawn=config.do_sample)
        return None if rule is None else BoundedProcessors(kwargs["logits_processor"], rule, head)


def prepare_head(model: PreTrainedModel, traits: Traits, mode: HeadMode) -> None:
    """Give the client's part of a model, from `load_ends`, the head of a mode.

    "auto": an exact one with a copy in 8 bits, or a reason why it has none. "int8": as `round_ends`, which raises
    BadConfiguration.
    """
    head: Any = model.get_output_embeddings()
    mixed: Any = model
    if mode == "int8":
        mixed._facts = HeadFacts(*round_ends(model, traits))
    if mode != "auto":
        return
    facts = mixed._facts = HeadFacts(_bytes_of(head))
    why: str | None = "it is no plain linear layer"
    if type(head) is nn.Linear and "bias" not in dict(head.named_parameters()):
        why = unfit(head.weight)
    if why is None:
        bounded = BoundedHead(head.weight)
        why = _disproof(model, traits, bounded)
        if why is None:
            facts.int8_bytes, facts.prepared_s = bounded.n_bytes, bounded.prepared_s
            vars(head)["decided"] = (DecidedHead(bounded, facts),)
            head.__class__ = DecidedLinear
    facts.why_exact = why
    if facts.why_exact is not None:
        _log.warning("the head stays exact", why=facts.why_exact)


def _disproof(model: PreTrainedModel, traits: Traits, bounded: BoundedHead) -> str | None:
    """Run norm and head by the family's own forward once. Returns why bounds are not those of its logits, or None."""
    drawn = torch.randn(1, 1, traits.hidden_size, generator=torch.Generator().manual_seed(0))
    calls: list[tuple[Tensor, Tensor]] = []
    hook = model.get_output_embeddings().register_forward_hook(lambda _, args, output: calls.append((args[0], output)))
    try:
        replace_blocks(model, traits, lambda hidden: drawn.to(hidden.dtype))
        with torch.no_grad():
            logits = model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False).logits
            ((input, output),) = calls
            bounds = bounded.bounds(input[0])
            rows = torch.arange(len(bounded.weight))[:: max(1, len(bounded.weight) // 256)]
            narrow = bounded.narrow(input[0], rows)
    except Exception as error:  # noqa: BLE001 - a family that needs more breaks in any way
        return f"its forward does not show what the head is: {str(error)[:100]}"
    finally:
        hook.remove()
    exact = output.float()[0, 0]
    if bounds is None or not torch.equal(logits.float()[0, 0], exact):
        return "the family changes its logits"
    if not (_holds(bounds, exact) and _holds(narrow, exact[rows])):
        return "torch's products are not within their bounds on this processor"
    return None


def _holds(bounds: Bounds, exact: Tensor) -> bool:
    return bool(((bounds.low <= exact) & (exact <= bounds.high)).all())


def _bytes_of(head: nn.Module | None) -> int:
    return 0 if head is None else sum(weight.nbytes for weight in head.parameters())


def _adds_up_in_float32() -> bool:
    """Whether nothing has allowed torch to multiply in fewer bits, as autocast does."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is None:  # torch says it elsewhere before 2.9
        is_full = torch.get_float32_matmul_precision() == "highest"
    else:
        is_full = matmul.fp32_precision in {"none", "ieee"}
    return is_full and not torch.is_autocast_enabled("cpu")
