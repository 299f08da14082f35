"""A gateway whose model says what a test wants: the engine's interface, behind the real HTTP server."""

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace

import uvloop
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from swarm.config import UpstreamSettings
from swarm.errors import ModelNotFound
from swarm.gateway.answering import Model
from swarm.gateway.api.dialect import About
from swarm.gateway.app import Gateway, GatewayLimits, make_app
from swarm.gateway.generation import Emitted, Generation, Likely, Rerouted, Started, Token
from swarm.gateway.text import TokenTexts
from swarm.gateway.upstream import polled
from swarm.web import WebServer, url_of
from tests.support.swarms import DEMO_CHECKPOINT

NAME = "scripted"
Script = Callable[[Generation], "Sequence[str | Exception | Rerouted | Future[None]] | str"]
"""What the model says to a prompt: text, and in between errors that are raised, changes of the route, and futures that
it waits for: a test sets their results."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class ScriptedBackend:
    """Says the same as its script, token by token; `asked` are the generations that it got.

    cached: tokens of each prompt that a kept session is said to have had.
    """

    tokenizer: PreTrainedTokenizerBase
    script: Script
    positions_max: int = 8192
    token_s: float = 0.0
    prompt_s: float = 0.0
    cached: int = 0
    asked: list[Generation] = field(default_factory=list)
    running: int = 0

    @property
    def vocabulary(self) -> int:
        return len(self.tokenizer)

    async def generate(self, generation: Generation) -> AsyncGenerator[Emitted, bool | None]:
        self.asked.append(generation)
        self.running += 1
        try:
            await asyncio.sleep(self.prompt_s)
            said = self.script(generation)
            yield Started(self.cached, self._echo(generation))
            count = 0
            for part in [said] if isinstance(said, str) else said:
                if isinstance(part, Exception):
                    raise part
                if isinstance(part, Rerouted):
                    yield part
                    continue
                if isinstance(part, Future):
                    await asyncio.wrap_future(part)
                    continue
                for token in self.tokenizer.encode(part, add_special_tokens=False):
                    if count >= generation.tokens_max:
                        return
                    count += 1
                    await asyncio.sleep(self.token_s)
                    if (yield self._token(token, generation)):
                        return
            if count < generation.tokens_max and generation.stop_ids:
                yield self._token(min(generation.stop_ids), generation)
        finally:
            self.running -= 1

    def _echo(self, generation: Generation) -> tuple[Token, ...]:
        if not generation.echo:
            return ()
        first, *rest = generation.prompt
        return (Token(first), *(self._token(token, generation) for token in rest))

    def _token(self, token: int, generation: Generation) -> Token:
        count = generation.sampling.logprobs
        if count is None:
            return Token(token)
        return Token(token, -0.25, tuple(Likely(token, -0.25 - i) for i in range(count)))


class ScriptedModels:
    """One loaded model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.names = [model.name]

    async def routes(self) -> dict[str, str]:
        return dict.fromkeys(self.names, "")

    def check(self, name: str) -> None:
        if name not in self.names:
            raise ModelNotFound(name, "this is a test")

    def about(self, name: str) -> About:
        self.check(name)
        return About(self.model.root, "llama", 12, 128, self.model.backend.positions_max)

    def loaded(self) -> list[Model]:
        return [self.model]

    async def get(self, name: str, until: AsyncExitStack) -> Model:
        self.check(name)
        return self.model


def scripted_model(script: Script, *, template: str = CHATML, token_s: float = 0.0, prompt_s: float = 0.0) -> Model:
    """A model that says what the script wants, with the vocabulary of the demo's checkpoint."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_CHECKPOINT)
    tokenizer.chat_template = template
    backend = ScriptedBackend(tokenizer, script, token_s=token_s, prompt_s=prompt_s)
    return Model(NAME, "0" * 64, backend, tokenizer, frozenset({tokenizer.eos_token_id}), TokenTexts(tokenizer))


@contextmanager
def running(gateway: Gateway, upstreams: Sequence[UpstreamSettings] = ()) -> Iterator[str]:
    """Serve a gateway in a thread. Yields its URL when it takes requests."""
    started, stop = threading.Event(), threading.Event()

    async def serve(listening: socket.socket) -> None:
        async with polled(upstreams) as polling:
            server = WebServer(make_app(replace(gateway, upstreams=polling)), started.set)
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            await asyncio.to_thread(stop.wait)
            server.should_exit = True
            await serving

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=lambda: uvloop.run(serve(listening)), daemon=True)
        thread.start()
        try:
            assert started.wait(20)
            yield url_of(listening)
        finally:
            stop.set()
            thread.join(10)


@contextmanager
def scripted(
    script: Script, *, limits: GatewayLimits | None = None, **options: object
) -> Iterator[tuple[str, ScriptedBackend]]:
    """A running gateway with one scripted model. Yields its URL and the backend."""
    model = scripted_model(script, **options)
    with running(Gateway(ScriptedModels(model), limits or GatewayLimits())) as url:
        yield url, model.backend
