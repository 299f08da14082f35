"""Ollama's dialect: `/api/chat`, `/api/generate`, and the endpoints that describe models."""

import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from swarm.gateway.answering import Model
from swarm.gateway.api.dialect import Dialect, Served, allowed, conversation_of, owner_of
from swarm.gateway.api.ollama_answers import ChatAnswer, GenerateAnswer, Running, Shown, Tags, Version
from swarm.gateway.api.ollama_requests import ChatRequest, GenerateRequest
from swarm.gateway.api.problems import Problem
from swarm.gateway.api.sse import streamed
from swarm.gateway.chat import Chat, Event, Finished, PromptDone, Reasoning, Text, TokenText, ToolCall

TAG = ":latest"
Body = dict[str, Any]


class ShowRequest(BaseModel):
    """The body of `POST /api/show`. Older clients say name."""

    model: str | None = None
    name: str | None = None


class AnyContentType(APIRoute):
    """Reads every body as JSON: `curl -d` of Ollama's documentation says that it is a form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of requests."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            others = [each for each in request.scope["headers"] if each[0] != b"content-type"]
            headers = [*others, (b"content-type", b"application/json")]
            return await handle(Request({**request.scope, "headers": headers}, request.receive))

        return handle_json


def router(served: Served) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(route_class=AnyContentType)
    models = _Models(served)
    _add_models(routes, served, models)

    @routes.post("/api/chat", response_model=None, responses=_of(ChatAnswer))
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, as lines of JSON or whole."""
        return await answered(body, request, _Answer(body.model, _chat_piece))

    @routes.post("/api/generate", response_model=None, responses=_of(GenerateAnswer))
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Answer a prompt, as lines of JSON or whole."""
        return await answered(body, request, _Answer(body.model, _generate_piece))

    async def answered(body: ChatRequest | GenerateRequest, request: Request, answer: "_Answer") -> Response:
        name = models.named(body.model)
        asked = body.asked(owner_of(request), conversation_of(request), name)
        model = await served.model(name, request)
        answer.loaded()
        if body.only_loads:
            return JSONResponse(answer.without_events("unload" if body.unloads else "load"))
        events = model.chat(asked) if isinstance(asked, Chat) else model.complete(asked)
        if body.is_streamed:
            lines, no_text = answer.lines(events), line(answer.piece(Piece()))
            kind = DIALECT.stream_type
            return await streamed(lines, error_line, served.streams, keep_alive=no_text, media_type=kind)
        return JSONResponse(await answer.whole(events))

    return routes


def _add_models(routes: APIRouter, served: Served, models: "_Models") -> None:
    @routes.get("/api/version", response_model=None, responses=_of(Version))
    async def version() -> Body:
        """Tell which version of Ollama has this interface."""
        return {"version": "0.12.11"}  # the one whose interface this is: clients ask for a least version

    @routes.get("/api/tags", response_model=None, responses=_of(Tags))
    async def tags(request: Request) -> Body:
        """List the models that requests can name."""
        return {"models": [models.listed(name) for name in allowed(served.models.names, request)]}

    @routes.get("/api/ps", response_model=None, responses=_of(Running))
    async def ps(request: Request) -> Body:
        """List the models that are loaded."""
        loaded = {model.name: model for model in served.models.loaded()}
        return {"models": [models.running(loaded[name]) for name in allowed(list(loaded), request)]}

    @routes.post("/api/show", response_model=None, responses=_of(Shown))
    async def show(body: ShowRequest, request: Request) -> Body:
        """Tell about one model."""
        name = models.named(body.model or body.name or "")
        return models.shown(name, await served.model(name, request))


def _of(answer: type[BaseModel]) -> dict[int | str, Body]:
    return {200: {"model": answer}}


# --- models ----------------------------------------------------------------------------------------------------------


class _Models:
    """The catalogue as Ollama's clients see it: a name without a tag has the tag "latest"."""

    def __init__(self, served: Served) -> None:
        self._models = served.models
        self._since = _written(served.started)

    def named(self, name: str) -> str:
        """Return a model's name in the catalogue. Raises ModelNotFound."""
        if name not in self._models.names:
            name = name.removesuffix(TAG)
        self._models.check(name)
        return name

    def listed(self, name: str) -> Body:
        """Return a model's entry in lists. size: 0, since the weights are on the swarm's servers."""
        about = self._models.about(name)
        tagged = name + TAG
        common = {"name": tagged, "model": tagged, "modified_at": self._since, "size": 0, "digest": about.root}
        return {**common, "details": self._details(name)}

    def running(self, model: Model) -> Body:
        """Return a loaded model's entry."""
        never = "9999-12-31T23:59:59Z"
        context = {"context_length": model.backend.positions_max}
        return {**self.listed(model.name), "expires_at": never, "size_vram": 0, **context}

    def shown(self, name: str, model: Model) -> Body:
        """Return all about a model."""
        about = self._models.about(name)
        template = str(model.tokenizer.chat_template or "")
        capabilities = {"completion": True, "tools": "tools" in template, "thinking": "think" in template}
        return {
            "modelfile": f"FROM {name}",
            "parameters": "",
            "template": template,
            "modified_at": self._since,
            "details": self._details(name),
            "model_info": {
                "general.architecture": about.family,
                "general.basename": name,
                f"{about.family}.block_count": about.n_blocks,
                f"{about.family}.context_length": model.backend.positions_max,
                f"{about.family}.embedding_length": about.hidden_size,
                f"{about.family}.vocab_size": model.backend.vocabulary,
            },
            "capabilities": [each for each, has in capabilities.items() if has],
        }

    def _details(self, name: str) -> Body:
        family = self._models.about(name).family
        kind = {"parent_model": "", "format": "safetensors", "family": family, "families": [family]}
        return {**kind, "parameter_size": "", "quantization_level": ""}


# --- the answer ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Piece:
    """A part of an answer, or all of it."""

    text: str = ""
    thinking: str = ""
    calls: list[Body] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)

    def take(self, each: Event) -> bool:
        """Add an event. Returns whether it is a part of the answer."""
        match each:
            case Text():
                self.text += each.text
                self.tokens += each.tokens
            case Reasoning():
                self.thinking += each.text
            case ToolCall():
                function = {"index": each.index, "name": each.name, "arguments": json.loads(each.arguments)}
                self.calls.append({"id": each.id, "function": function})
            case _:
                return False
        return True


def _chat_piece(piece: Piece) -> Body:
    message: Body = {"role": "assistant", "content": piece.text}
    if piece.thinking:
        message["thinking"] = piece.thinking
    if piece.calls:
        message["tool_calls"] = piece.calls
    return {"message": message}


def _generate_piece(piece: Piece) -> Body:
    return {"response": piece.text, **({"thinking": piece.thinking} if piece.thinking else {})}


class _Answer:
    """Writes one answer, and takes the times that its last line tells."""

    def __init__(self, model: str, write: Callable[[Piece], Body]) -> None:
        """model: its name in the request. write: a piece, as the endpoint has it."""
        self._model = model
        self._write = write
        self._began_at = self._loaded_at = self._prompt_at = time.monotonic()
        self._prompt = self._output = 0
        self._reason = "stop"

    def loaded(self) -> None:
        """Note that the model is loaded."""
        self._loaded_at = self._prompt_at = time.monotonic()

    def piece(self, piece: Piece) -> Body:
        """Return a line that is not the last."""
        return {**self._head(), **self._write(piece), **_logprobs(piece), "done": False}

    def without_events(self, reason: str) -> Body:
        """Return the answer to a request that has nothing to answer."""
        return {**self._head(), **self._write(Piece()), "done": True, "done_reason": reason}

    async def whole(self, events: AsyncGenerator[Event, None]) -> Body:
        """Return an answer that is not streamed."""
        piece = Piece()
        async with aclosing(events):
            async for each in events:
                self._take(each)
                piece.take(each)
        return {**self._head(), **self._write(piece), **_logprobs(piece), **self._end()}

    async def lines(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
        """Write an answer as lines. The first has no text: it says that the prompt is computed."""
        async with aclosing(events):
            async for each in events:
                self._take(each)
                piece = Piece()
                if piece.take(each) or isinstance(each, PromptDone):
                    yield line(self.piece(piece))
        yield line({**self._head(), **self._write(Piece()), **self._end()})

    def _take(self, each: Event) -> None:
        match each:
            case PromptDone():
                self._prompt, self._prompt_at = each.tokens, time.monotonic()
            case Finished():
                self._output = each.tokens
                self._reason = "length" if each.reason == "length" else "stop"  # a tool call, too, is a stop

    def _head(self) -> Body:
        return {"model": self._model, "created_at": _written(time.time())}

    def _end(self) -> Body:
        now = time.monotonic()
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": _ns(now - self._began_at),
            "load_duration": _ns(self._loaded_at - self._began_at),
            "prompt_eval_count": self._prompt,
            "prompt_eval_duration": _ns(self._prompt_at - self._loaded_at),
            "eval_count": self._output,
            "eval_duration": _ns(now - self._prompt_at),
        }


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _written(at: float) -> str:
    """Return a time, in seconds since 1970, as Ollama writes it."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _logprobs(piece: Piece) -> Body:
    if not piece.tokens:
        return {}
    return {
        "logprobs": [{**_token(each.text, each.raw, each.logprob), "top_logprobs": _top(each)} for each in piece.tokens]
    }


def _top(token: TokenText) -> list[Body]:
    return [_token(*each) for each in token.top]


def _token(text: str, raw: bytes, logprob: float) -> Body:
    return {"token": text, "logprob": logprob, "bytes": list(raw)}


def line(body: Body) -> bytes:
    """Write one line of a stream."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def error_body(problem: Problem) -> Body:
    """Return an error as Ollama writes it."""
    return {"error": problem.message}


def error_line(problem: Problem) -> bytes:
    """Return the last line of a stream that has failed."""
    return line(error_body(problem))


DIALECT = Dialect(("/api/",), error_body, "application/x-ndjson")
