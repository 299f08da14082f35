"""OpenAI's dialect: models, chat completions, completions and responses."""

import asyncio
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from swarm.gateway.account import account_of
from swarm.gateway.api import chat, chat_events, completions, responses, responses_events
from swarm.gateway.api.dialect import Dialect, Served, conversation_of, owner_of
from swarm.gateway.api.requests import REQUEST
from swarm.gateway.api.sse import collected, streamed

DIALECT = Dialect(("/v1/",), chat_events.error_body)


def router(served: Served) -> APIRouter:
    """Return the routes."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """List the models that requests can name."""
        routes: dict[str, str] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(REQUEST.routes_s):
                routes = await served.models.routes()
        return {"object": "list", "data": [_model(served, name, routes.get(name)) for name in served.names(request)]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        """Tell about one model."""
        account_of(request).check(name)
        if name not in served.names(request):
            served.models.check(name)
        return _model(served, name)

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: chat.ChatRequest, request: Request) -> Response:
        """Answer a conversation, whole or as a stream."""
        asked = body.chat(owner_of(request), conversation_of(request))
        model = await served.model(asked.model, request)
        events = model.chat(asked)
        if not body.stream:
            return JSONResponse(chat_events.whole(asked, model, await collected(events)))
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        route = request.headers.get("x-swarm-route") == "show"
        chunks = chat_events.chunks(asked, model, events, include_usage=usage, show_route=route)
        return await streamed(chunks, chat_events.error_event, served.streams)

    @routes.post("/v1/completions", response_model=None)
    async def text_completions(body: completions.CompletionRequest, request: Request) -> Response:
        """Continue texts, or token ids, whole or as a stream."""
        asked = body.completions(owner_of(request), conversation_of(request))
        model = await served.model(body.model, request)
        texts = [model.text_of(each.prompt) for each in asked] if body.echo else [""] * len(asked)
        writer = completions.Writer(asked, model, texts)
        events = completions.all_of([model.complete(each) for each in asked], asked[0].n)
        if not body.stream:
            return JSONResponse(writer.whole(await collected(events)))
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return await streamed(writer.chunks(events, include_usage=usage), chat_events.error_event, served.streams)

    @routes.post("/v1/responses", response_model=None)
    async def create_response(body: responses.ResponseRequest, request: Request) -> Response:
        """Answer a conversation that is given as items, whole or as a stream."""
        asked = body.chat(owner_of(request), conversation_of(request))
        model = await served.model(asked.model, request)
        events, writer = model.chat(asked), responses_events.Writer(body)
        if not body.stream:
            return JSONResponse(writer.whole(await collected(events)))
        return await streamed(writer.chunks(events), writer.failed, served.streams)

    return routes


def _model(served: Served, name: str, no_route: str | None = None) -> dict[str, Any]:
    """Return a model's entry. no_route: why it has no route, "" where it has one; None where that is not known."""
    entry: dict[str, Any] = {"id": name, "object": "model", "created": int(served.started), "owned_by": "swarm"}
    if no_route is not None:
        entry["swarm"] = {"status": "broken" if no_route else "healthy"}
    return entry
