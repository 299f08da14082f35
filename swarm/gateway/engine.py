"""The engine of one model: a coroutine and a session for each generation, one batch for all heads that are ready.

    generate -> Conversations.take | Membership.open     a session, with as much of the prompt as it has already
             -> Session.step                             the rest of the prompt
             -> Ahead.step                               one token after the other, with guesses ahead where they pay
             -> Head                                     in the compute thread, with those of all other generations

`generate()` of `transformers` would need a thread and 2.6 to 4.5 ms of processor time a token for each stream; this
takes a quarter, and its head reads the weights once for all. Sessions keep token ids in their journals, because
embeddings of a long prompt take thousands of times as much.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2s
from math import inf
from secrets import token_bytes
from typing import Any, Literal

import torch
from torch import Tensor

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.session.membership import Membership
from swarm.client.session.plan import SessionPlan
from swarm.client.session.session import Session
from swarm.client.speculation.drafts import Lookup
from swarm.compute.task import Executor, Probe, Task
from swarm.errors import PromptTooLong
from swarm.gateway.ahead import Ahead, DraftUse, Guessing, GuessLimits
from swarm.gateway.conversations import ConversationLimits, Conversations, Kept
from swarm.gateway.generation import Emitted, Generation, Rerouted, Started, Token
from swarm.gateway.head import Head, Next, echoed
from swarm.gateway.sampler import Sampler
from swarm.limits import limit
from swarm.model.checkpoint import Checkpoint
from swarm.model.tokens import TokenEnds
from swarm.protocol.journal import Expansion
from swarm.protocol.marks import MarkLimits, Prefix
from swarm.protocol.messages import POSITIONS_MAX

PrefixUse = Literal["none", "own", "shared"]
"""Which beginnings of prompts servers keep for later sessions: none, each owner's for itself, or all for all owners."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of one model's generations."""

    step_timeout_s: float = limit(120.0, "s", "a step, or a chunk of a prompt, that takes longer ends its generation")
    wait_for_blocks_s: float = limit(0.0, "s", "how long a session waits for blocks that no server announces")
    piece_tokens: int = limit(4096, "tokens", "of a prompt that are embedded at once: 64 MB at a hidden size of 8192")
    sessions_max: int = limit(
        60, "sessions", "of the gateway, as a server gives one peer; then the oldest idle one goes"
    )
    inline_tokens: int = limit(64, "tokens", "are embedded in the loop, in microseconds; more go to the compute thread")
    echo_rows: int = limit(64, "positions", "whose logits are in memory at once: 33 MB at a vocabulary of 128k")
    crowded_s: float = limit(0.5, "s", "a session that opens for longer has the oldest idle one closed")
    conversations: ConversationLimits = field(default_factory=ConversationLimits)
    marks: MarkLimits = field(default_factory=MarkLimits)
    guesses: GuessLimits = field(default_factory=GuessLimits)
    prefixes: PrefixUse = "own"
    draft: DraftUse = "lookup"


class Engine:
    """Generates with one model. Its methods run in the loop that the membership runs in."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        ends: TokenEnds,
        swarm: Membership,
        compute: Executor,
        limits: EngineLimits | None = None,
    ) -> None:
        """compute: runs the heads; several engines may share it."""
        self.limits = limits or EngineLimits()
        traits = checkpoint.traits
        self.positions_max = min(traits.positions_max or POSITIONS_MAX, POSITIONS_MAX)
        self.vocabulary = ends.vocabulary
        self.swarm = swarm
        self._ends = ends
        self._compute = compute
        self._loop = asyncio.get_running_loop()
        self._salt = token_bytes(16)
        self._blocks = Blocks(0, traits.n_blocks)
        rolls_back = set(traits.kinds) <= {"full", "none"} and traits.can_roll_back
        guesses = self.limits.draft != "none" and traits.can_roll_back
        self.guessing = Guessing(Lookup if guesses else None, self.limits.guesses)
        self._plan = SessionPlan(
            root=checkpoint.root,
            positions_max=self.positions_max,
            rollback_max=self.limits.guesses.ahead.tokens_max if guesses and not rolls_back else 0,
            step_timeout_s=self.limits.step_timeout_s,
            wait_for_blocks_s=self.limits.wait_for_blocks_s,
            expansion=Expansion(lambda ids, start: ends.embed(ids[:, :, 0], start), ends.position_bytes),
        )
        self.conversations = Conversations(self.limits.conversations, rolls_back=rolls_back, now=self._loop.time)

    def generate(self, generation: Generation) -> AsyncGenerator[Emitted, bool | None]:
        """Generate until the end; see `Backend`. Raises SwarmError."""
        return _Run(self, generation).emit()

    async def close(self) -> None:
        """Close the idle sessions."""
        await self.conversations.close()

    # For its runs

    def now(self) -> float:
        """Return the loop's time, in seconds."""
        return self._loop.time()

    async def embed(self, ids: Sequence[int], start: int) -> Tensor:
        """Return hidden states [1, tokens, hidden_size] of token ids at positions from `start` on."""
        ends, tensor = self._ends, torch.tensor([list(ids)])
        if len(ids) <= self.limits.inline_tokens and ends.is_direct[0]:
            return ends.embed(tensor, start)
        hidden: Tensor = await self.compute(Probe(lambda: ends.embed(tensor, start)))
        return hidden

    async def next(self, hidden: Tensor, sampler: Sampler, position: int, owner: str) -> Next:
        """Sample the next token of one generation."""
        head = Head(self._ends, sampler, hidden, position, owner)
        try:
            chosen: Next = await self.compute(head)
        except asyncio.CancelledError:
            head.is_given_up = True
            raise
        return chosen

    async def echo(self, hidden: Tensor, ids: Sequence[int], top: int) -> list[Token]:
        """Return prompt tokens with their probabilities; hidden: [1, tokens, hidden_size], right before them."""
        ends, rows = self._ends, self.limits.echo_rows
        tokens: list[Token] = await self.compute(Probe(lambda: echoed(ends, hidden[0], ids, top, rows)))
        return tokens

    async def compute(self, task: Task) -> Any:  # noqa: ANN401 - a task returns anything
        """Run a task in the compute thread. Its errors are raised here."""
        waiting: asyncio.Future[Any] = self._loop.create_future()

        def done(outcome: object) -> None:
            if waiting.done():
                return
            if isinstance(outcome, BaseException):
                waiting.set_exception(outcome)
            else:
                waiting.set_result(outcome)

        self._compute.submit(task, done)
        return await waiting

    # Sessions

    def _tenant(self, owner: str) -> str | None:
        """Return an owner's name for servers: they learn which sessions are of one owner, and nothing of whom."""
        return blake2s(owner.encode(), key=self._salt, digest_size=8).hexdigest() if owner else None

    def _prefix(self, generation: Generation) -> Prefix | None:
        """Return the prompt for servers to recognize, by its owner's secret. An echo needs each position computed."""
        use = self.limits.prefixes
        if use == "none" or generation.echo:
            return None
        owner = generation.owner.encode() if use == "own" else b""
        secret = blake2s(owner, key=self._salt, person=b"prefix").digest()
        return Prefix(secret, tuple(generation.prompt), self.limits.marks)

    async def session(self, generation: Generation) -> tuple[Kept, int]:
        """Return a session, and how many positions of the prompt it has. Raises PromptTooLong or a RouteError."""
        needed = len(generation.prompt) + max(0, generation.tokens_max - 1)
        if needed > self.positions_max:
            raise PromptTooLong(needed, self.positions_max, "the model")
        await self.conversations.close_old()
        if not generation.echo:
            match = self.conversations.take(generation.prompt, generation.owner, generation.conversation)
            if match is not None:
                del match.kept.ids[match.keep :]
                match.kept.conversation = generation.conversation or match.kept.conversation
                return match.kept, match.keep
        plan = self._plan.sized(1, len(generation.prompt), self.swarm.sessions.limits.chunks)
        owner, prefix = generation.owner, self._prefix(generation)
        session = await self._opened(replace(plan, tenant=self._tenant(owner), prefix=prefix))
        held = session.length
        return Kept(session, list(generation.prompt[:held]), owner, generation.conversation), held

    async def _opened(self, plan: SessionPlan) -> Session:
        """Open a session. Idle ones give way before it, where a server would refuse one more, and while it waits."""
        sessions = self.swarm.sessions
        while len(sessions.open_sessions) >= self.limits.sessions_max and await self.conversations.close_oldest():
            pass
        opening = asyncio.ensure_future(self.swarm.open(self._blocks, plan))
        try:
            wait_s = self.limits.crowded_s
            while not (await asyncio.wait({opening}, timeout=wait_s))[0]:
                wait_s = self.limits.crowded_s if await self.conversations.close_oldest() else inf
            return opening.result()
        except BaseException:
            opening.cancel()
            await asyncio.wait({opening})
            if not opening.cancelled() and opening.exception() is None:  # it opened in that very moment
                await opening.result().close()
            raise


class _Run:
    """One generation on its session."""

    _kept: Kept  # its session, with the ids that every hop has
    _hops: frozenset[str]
    _repairs: int

    def __init__(self, engine: Engine, generation: Generation) -> None:
        self._engine = engine
        self._generation = generation

    async def emit(self) -> AsyncGenerator[Emitted, bool | None]:
        """Compute the prompt, then sample until the end; keep the session if it ends in good order."""
        generation, engine, in_order = self._generation, self._engine, False
        with engine.guessing.stream():
            self._kept, cached = await engine.session(generation)
            session = self._kept.session
            self._hops, self._repairs = frozenset(hop.peer_id for hop in session.route), session.repairs
            try:
                sampler = Sampler(generation.sampling, generation.prompt, generation.grammar)
                began = engine.now()
                hidden, echo = await self._prefill(cached)
                yield Started(cached, echo)
                yield self._rerouted(engine.now() - began)
                count, in_order, ahead = 0, generation.tokens_max == 0, self._ahead()
                while not in_order:
                    chosen = await engine.next(hidden, sampler, len(self._kept.ids), generation.owner)
                    for token in chosen.tokens:
                        count += 1
                        in_order = self._is_over(token.id, count, is_last=token is chosen.tokens[-1])
                        if (yield token):
                            in_order = True
                        if in_order:
                            return
                    began, ids = engine.now(), [token.id for token in chosen.tokens]
                    hidden = await ahead.step(ids, chosen.embedding)
                    self._kept.ids += ids
                    if session.repairs != self._repairs:
                        yield self._rerouted(engine.now() - began)
            finally:
                if in_order and not generation.echo:
                    await engine.conversations.put(self._kept)
                else:
                    await session.close()

    async def _prefill(self, cached: int) -> tuple[Tensor, tuple[Token, ...]]:
        """Compute the prompt behind `cached`. Returns the last position's output, and the echo that is asked for."""
        generation, engine = self._generation, self._engine
        prompt, hidden = generation.prompt, torch.empty(0)
        top = generation.sampling.logprobs or 0
        echo: list[Token] = [Token(prompt[0])] if generation.echo else []
        for start in range(cached, len(prompt), engine.limits.piece_tokens):
            part = prompt[start : start + engine.limits.piece_tokens]
            embedded = await engine.embed(part, start)
            hidden = await self._step(embedded, part, want=len(part) if generation.echo else 1)
            if generation.echo:
                echo += await engine.echo(hidden, prompt[start + 1 : start + 1 + len(part)], top)
        return hidden[:, -1:], tuple(echo)

    def _ahead(self) -> Ahead:
        """Return the steps behind the prompt, of which the last token that the output may have is never fed."""
        generation, engine, kept = self._generation, self._engine, self._kept
        fed = len(generation.prompt) + max(0, generation.tokens_max - 1)
        return Ahead(kept.session, kept.ids, engine.guessing, engine.embed, positions_max=fed, now=engine.now)

    async def _step(self, embedded: Tensor, ids: Sequence[int], want: int) -> Tensor:
        keep = len(self._kept.ids)
        tensor = torch.tensor([list(ids)], dtype=torch.int32)
        output = await self._kept.session.step(Activations(embedded), keep=keep, want=want, ids=tensor)
        self._kept.ids += ids
        return output

    def _is_over(self, token: int, count: int, *, is_last: bool) -> bool:
        """Whether the output ends with this token. is_last: of those that the grammar has taken."""
        generation = self._generation
        return (
            token in generation.stop_ids
            or count >= generation.tokens_max
            or (is_last and generation.grammar is not None and generation.grammar.is_over)
        )

    def _rerouted(self, took_s: float) -> Rerouted:
        session, before = self._kept.session, self._hops
        self._hops, self._repairs = frozenset(hop.peer_id for hop in session.route), session.repairs
        hops = tuple(f"{hop.peer_id} {hop.blocks}" for hop in session.route)
        return Rerouted(tuple(sorted(before - self._hops)), hops, took_s)
