"""A hollow `transformers` model whose blocks are a route through the swarm.

The model is the family's own class with embeddings, final norm and head. `generate()`
and hand-written loops use it as it is. Three things differ: block 0 is a call around the route, the cache is a
`RemoteCache`, and hooks read the model's own arguments (2-D attention mask, positions, number of wanted logits).
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.auditing.ledger import Audits
from swarm.client.hf.ahead import AheadSession
from swarm.client.hf.cache import ASSISTED_ROLLBACK, RemoteCache
from swarm.client.hf.drafting import Drafts
from swarm.client.hf.head import HeadedModel
from swarm.client.hf.hollow import without_gradient
from swarm.client.hf.lead import Drafting
from swarm.client.hf.ranges import Backend, RemoteBlockList, padding
from swarm.client.planning.explain import ExplainedRoute
from swarm.client.planning.promise import Exactness
from swarm.client.speculation.limits import AheadLimits
from swarm.client.speculation.pipe import Counts
from swarm.errors import PromptTooLong, UsageError
from swarm.model.checkpoint import Checkpoint
from swarm.model.ends import replace_blocks
from swarm.model.hollow import decoder_of
from swarm.protocol.messages import POSITIONS_MAX, ROLLBACK_MAX

AHEAD = AheadLimits()


@dataclass(slots=True)
class _Call:
    """The arguments of the running forward."""

    mask: Tensor | None = None  # 2-D, of all positions
    want_all: bool = True
    want: int = 0
    positions: Tensor | None = None
    cache: RemoteCache | None = None
    ids: Tensor | None = None  # [batch, tokens]
    only_embeds: bool = False


class _Embedded(Exception):
    """What block 0 gets, [batch, tokens, hidden_size]: the blocks are not asked."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class InferenceSession:
    """A conversation's state on the servers, kept between calls of `generate()`."""

    def __init__(self, cache: RemoteCache) -> None:
        self.cache = cache

    @property
    def length(self) -> int:
        """Positions that the servers hold."""
        return self.cache.length

    def close(self) -> None:
        """Free the leases on the servers."""
        self.cache.close()


class DistributedModel(HeadedModel):
    """The additions of a distributed model. `distribute` mixes it in before the family's class."""

    backend: Backend
    checkpoint: Checkpoint
    """The files: `root`, `pin`, and `texts()`, which make the tokenizer."""
    _calls: threading.local
    _drafts: Drafts
    _latest: Counts | None

    @property
    def route(self) -> ExplainedRoute:
        """The hops that the model runs through; each has `peer_id`, `blocks`, `numeric_class` and `latency_ms`.

        Printed, it is a table. `route.explain()` adds why other servers were not chosen.
        """
        return self.backend.route()

    @property
    def audits(self) -> Audits:
        """What audits have shown: how many sessions others agree with, and the peers that computed wrongly.

        A share of the sessions is computed once more on other servers, after they have ended.
        """
        return self.backend.audits

    @property
    def exactness(self) -> Exactness:
        """What stays the same if other servers of the same numeric classes have the blocks: "bits", "tokens" or "tier".

        Of the route that `route` returns: a repair may change it (docs/quantisation.md).
        """
        return self.route.exactness

    @property
    def last_speculation(self) -> Counts | None:
        """What became of the guesses of the latest session; None before the first one."""
        return self._latest

    @property
    def blocks(self) -> RemoteBlockList:
        """The blocks, to be called by range: `model.blocks[4:8](hidden)`."""
        return RemoteBlockList(self.backend)

    @contextmanager
    def inference_session(self, *, max_length: int | None = None, rollback_max: int = 0) -> Iterator[InferenceSession]:
        """Keep the state on the servers between calls, for a chat.

        Within the block, every `generate()` and forward of this thread without a cache of its own continues this one:
        pass the whole conversation, only its new positions are computed; what `generate()` gets no more is taken back.
        Other threads' calls have nothing to do with it, and each may have a session of its own. max_length: positions
        that the conversation may reach. rollback_max: positions that may be taken back at a time, where the model has
        sliding windows; 4096 at most.
        """
        if self._chat is not None:
            raise UsageError("there is an inference_session already; end it first")
        chat = self._calls.chat = self.new_cache(max_length, rollback_max)
        chat.remembers = True
        try:
            yield InferenceSession(chat)
        finally:
            chat.close()
            self._calls.chat = None

    def new_cache(self, max_length: int | None = None, rollback_max: int = 0) -> RemoteCache:
        """Make an empty cache on the servers; its leases are freed when it is collected.

        max_length, rollback_max: as in `inference_session`. Raises UsageError.
        """
        if not 0 <= rollback_max <= ROLLBACK_MAX:
            raise UsageError(f"rollback_max={rollback_max}: 0 to {ROLLBACK_MAX} positions can be taken back at a time")
        limit = self.backend.traits.positions_max or 1 << 20  # where the model declares no limit
        positions_max = min(max_length or limit, limit, POSITIONS_MAX)
        blocks = Blocks(0, self.backend.traits.n_blocks)
        backend, opened = self.backend, list[AheadSession]()
        forgets = any(kind != "full" for kind in backend.traits.kinds)
        guesses = backend.traits.can_roll_back and (not forgets or self._calls_drafting is not None)

        def open_session(rollback: int) -> AheadSession:
            most = min(AHEAD.tokens_max, ROLLBACK_MAX - rollback) if guesses else 0
            # Guesses that were wrong are taken back together with what the caller takes back. 0 is no bound, where no
            # layer forgets.
            more = rollback + most if rollback or forgets else 0
            session = backend.open_session(blocks, positions_max=positions_max, rollback_max=more)
            opened.append(AheadSession(session, self._embed, most, positions_max, AHEAD))
            self._latest = opened[-1].counts
            if not backend.traits.can_roll_back:
                self._latest.off = f"{backend.traits.model_type} models have a state that cannot be taken back"
            return opened[-1]

        cache = RemoteCache(backend.traits, open_session, rollback_max)
        weakref.finalize(cache, _close_all, opened)
        return cache

    def close(self) -> None:
        """Leave the swarm; the model cannot be used any more."""
        self.backend.close()

    def __enter__(self) -> "DistributedModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Where `transformers` calls

    def generate(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the family's class has it
        """As in `transformers`. It frees the leases of caches that it made and does not return."""
        name = self.backend.traits.cache_argument
        ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        if self._chat is not None and self.backend.traits.cache_in(kwargs) is None:
            _check_uses_cache(self.generation_config, kwargs)
            if isinstance(ids, Tensor):
                self._chat.take_back_to(ids)
            kwargs[name] = self._chat
        drafting = self._drafts.of_call(kwargs, ids.shape[0] if isinstance(ids, Tensor) else None)
        before = getattr(self._calls, "made", None), self._calls_drafting
        made: list[RemoteCache] = []
        self._calls.made, self._calls.drafting = made, drafting  # by thread: several may generate at once
        result: Any = None
        try:
            result = super().generate(*args, **kwargs)  # type: ignore[misc]
            return result
        finally:
            for cache in made:
                if not isinstance(result, dict) or result.get(name) is not cache:
                    cache.close()
            self._calls.made, self._calls.drafting = before

    @property
    def _chat(self) -> RemoteCache | None:
        """The cache of this thread's `inference_session`."""
        chat: RemoteCache | None = getattr(self._calls, "chat", None)
        return chat

    @property
    def _calls_drafting(self) -> Drafting | None:
        """Where the guesses of this thread's running call come from."""
        drafting: Drafting | None = getattr(self._calls, "drafting", self._drafts.drafting)
        return drafting

    def _sample(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as `transformers` has it
        """Do as `transformers` does; a draft learns what is about to be drawn."""
        before = getattr(self._calls, "processors", None)
        samples = kwargs["generation_config"].do_sample and input_ids.device.type == "cpu"
        self._calls.processors = kwargs["logits_processor"] if samples else None
        try:
            return super()._sample(input_ids, *args, **kwargs)
        finally:
            self._calls.processors = before

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Put a RemoteCache where `transformers` would make one of its own."""
        del batch_size, max_cache_length  # a chat may go on with this cache; memory is charged when it is used
        if generation_mode == GenerationMode.ASSISTED_GENERATION:
            self._calls.drafting = None  # `transformers` does it itself
        name = self.backend.traits.cache_argument
        given = model_kwargs.get(name)
        if given is not None:
            if not isinstance(given, RemoteCache):
                raise UsageError(f"{name} must come from this model (new_cache or an earlier output)")
        elif generation_config.use_cache is not False:
            rollback = ASSISTED_ROLLBACK if generation_mode == GenerationMode.ASSISTED_GENERATION else 0
            cache = self.new_cache(rollback_max=rollback)
            model_kwargs[name] = cache
            self._calls.made.append(cache)

    def _before_model(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the arguments of the outermost forward."""
        if len(args) > 1:
            kwargs = {**inspect.signature(type(self).forward).bind_partial(self, *args).arguments, **kwargs}
        for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
            if kwargs.get(name):
                raise UsageError(f"{name} is not available: the blocks run on other machines")
        embeds = kwargs.get("inputs_embeds")
        if embeds is not None and embeds.requires_grad and torch.is_grad_enabled():
            raise UsageError("gradients do not pass through the swarm; run this under torch.no_grad()")
        keep = kwargs.get("logits_to_keep")
        self._calls.current = _Call(
            mask=kwargs.get("attention_mask"),
            want_all=not isinstance(keep, int) or keep == 0 or kwargs.get("labels") is not None,
            want=keep if isinstance(keep, int) else 0,
        )

    def _before_decoder(
        self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Look at the arguments of the decoder's forward; give it a cache on the servers if it is to have one."""
        call: _Call | None = getattr(self._calls, "current", None)
        if call is None:  # the decoder is called on its own
            call = self._calls.current = _Call(mask=kwargs.get("attention_mask"))
        name = self.backend.traits.cache_argument
        cache = kwargs[name] if name in kwargs else self.backend.traits.cache_in(kwargs)
        use_cache = kwargs.get("use_cache")
        if use_cache is None:
            use_cache = getattr(self.config.get_text_config(decoder=True), "use_cache", True)
        if cache is None and use_cache:
            generates = getattr(self._calls, "made", None) is not None  # a forward beside: guidance, a criterion
            cache = kwargs[name] = self._chat if self._chat is not None and not generates else self.new_cache()
        if cache is not None and not isinstance(cache, RemoteCache):
            raise UsageError(f"{name} must come from this model (new_cache or an earlier output)")
        call.cache = cache
        call.positions = kwargs.get("position_ids")
        call.ids = kwargs.get("input_ids", args[0] if args else None)
        return args, kwargs

    @torch.no_grad()
    def _embed(self, ids: Tensor, start: int) -> Tensor:
        """Return what block 0 gets for tokens [1, n] from a position on: by the family's own forward."""
        traits, decoder = self.backend.traits, decoder_of(self)[0]
        ids = ids.to(self.device)
        arguments: dict[str, Any] = {"input_ids": ids, traits.cache_argument: RemoteCache.at(traits, start)}
        if traits.takes_positions:
            arguments["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        self._calls.current = _Call(only_embeds=True)
        try:
            decoder(use_cache=True, **arguments)
        except _Embedded as embedded:
            return embedded.hidden
        finally:
            self._calls.current = None  # also where it fails before the blocks
        raise AssertionError("the blocks were not called")

    def _run_blocks(self, hidden: Tensor) -> Tensor:
        """Stand for all blocks: hidden states [batch, tokens, hidden_size] go once around the route."""
        return without_gradient(hidden, self._around(hidden))

    @torch.no_grad()
    def _around(self, hidden: Tensor) -> Tensor:
        call, self._calls.current = self._calls.current, None
        if call.only_embeds:
            raise _Embedded(hidden)
        batch, tokens, width = hidden.shape
        past = call.cache.length if call.cache is not None else 0
        limit = self.backend.traits.positions_max
        if limit is not None and past + tokens > limit:
            raise PromptTooLong(past + tokens, limit, "the model")
        activations = Activations(hidden, _unusual(call.positions, past, batch, tokens), padding(call.mask, tokens))
        want = tokens if call.want_all else min(call.want, tokens)
        output: Tensor
        if call.cache is not None:
            guessing = {"drafting": self._calls_drafting, "processors": getattr(self._calls, "processors", None)}
            output = call.cache.step(activations, want=want, ids=call.ids, mask=call.mask, **guessing)
        else:
            if call.mask is None and call.positions is not None and bool((call.positions.diff() != 1).any()):
                raise UsageError("sequences that lie behind each other in a row are not kept apart: pass them as rows")
            session = self.backend.open_session(
                Blocks(0, self.backend.traits.n_blocks), positions_max=tokens, rollback_max=0
            )
            try:
                output = session.step(activations, keep=0, rows=None, want=want)
            finally:
                session.close()
        if not self.backend.traits.has_wide_residual:
            output = output.to(self.backend.dtype)  # the ends of most families fail on any other
        missing = tokens - output.shape[1]
        if missing:
            output = torch.cat([hidden.new_zeros(batch, missing, width), output], dim=1)  # not looked at
        return output


def distribute(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    backend: Backend,
    drafting: Drafting | None = None,
    mtp: Callable[[], Drafting] | None = None,
) -> DistributedModel:
    """Turn the client's part of a model into a distributed one. checkpoint: of which that part was loaded.

    drafting: where guesses of next tokens come from. mtp: loads the blocks for multi-token prediction, when a call
    asks for them.
    """
    cls = type(model)
    model.__class__ = type(cls.__name__, (DistributedModel, cls), {"__module__": cls.__module__})
    assert isinstance(model, DistributedModel)
    model.backend = backend
    model.checkpoint = checkpoint
    model._calls = threading.local()
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    model._drafts = Drafts(model.name_or_path or "", vocabulary, drafting, mtp)
    model._latest = None
    replace_blocks(model, backend.traits, model._run_blocks)
    model.register_forward_pre_hook(model._before_model, with_kwargs=True)
    decoder, _ = decoder_of(model)
    decoder.register_forward_pre_hook(model._before_decoder, with_kwargs=True)
    calls = model._calls  # a forward that has failed before its blocks leaves nothing there for the next call
    decoder.register_forward_hook(lambda *_: setattr(calls, "current", None), always_call=True)
    return model


def _check_uses_cache(config: Any, kwargs: Mapping[str, Any]) -> None:  # noqa: ANN401 - a generation config
    """Raise UsageError where `generate` would feed the whole text again and again to a conversation."""
    uses = kwargs.get("use_cache")
    if uses is None:
        uses = (kwargs.get("generation_config") or config).use_cache
    if uses is False:
        raise UsageError("use_cache=False is not for a conversation, which is a cache: generate outside of it")


def _unusual(positions: Tensor | None, past: int, batch: int, tokens: int) -> Tensor | None:
    """Return position ids that are not just past, past + 1, ...: only those travel."""
    if positions is None:
        return None
    if positions.dim() == 3:  # several axes for images; text has the same on all
        positions = positions[0]
    counted = torch.arange(past, past + tokens, device=positions.device)
    return None if bool((positions == counted).all()) else positions.to(torch.int64).expand(-1, tokens)


def _close_all(sessions: Sequence[AheadSession]) -> None:
    for session in sessions:
        session.close()
