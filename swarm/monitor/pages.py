"""The health page: rendered here, so that it needs no script; `static/page.js` keeps it up to date.

    GET /               the model with most servers
    GET /models/{root}  one model; `?q=` and `?block=` choose servers, `?all=true` shows all, `?window=` the history's
    GET /static/{name}  its style, script and chart library, named with their digest, so that they are kept for ever

Texts of strangers are escaped by the templates, which are all rendered with autoescape; the policy in the headers lets
only our scripts run. One rendering serves all readers until the state changes.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

from swarm.monitor import view, wording
from swarm.monitor.state import API, Block, History, ModelDetail, State, Window

GetState = Callable[[], State]
GetDetail = Callable[[str], ModelDetail | None]
GetHistory = Callable[[str | None, Window], Awaitable[History | None]]

SCRIPTS = ("vendor/uplot.js", "page.js")
STYLES = ("page.css", "vendor/uplot.css")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of `static/`. digest: of its content, so that a new version has a new address."""

    content: bytes
    media_type: str
    digest: str


@dataclass(frozen=True, slots=True)
class Asked:
    """The part of a model that is shown. root: None for the first one. base: the path that a proxy puts before ours."""

    root: str | None
    base: str
    window: Window = "24h"
    q: str = ""
    block: int | None = None
    everything: bool = False

    @property
    def common(self) -> bool:
        """Whether others will ask for the same."""
        return not self.q and self.block is None and not self.everything


@dataclass(slots=True)
class Renderings:
    """The pages of one state: kept until it changes, and never more than `kept_max`."""

    kept_max: int = 4 * API.models_max
    state: State | None = None
    pages: dict[Asked, tuple[str, bytes]] = field(default_factory=dict)

    def get(self, state: State, asked: Asked) -> tuple[str, bytes] | None:
        """Return the ETag and the page, if they are known."""
        if state is not self.state:
            self.state = state
            self.pages.clear()
        return self.pages.get(asked)

    def put(self, state: State, asked: Asked, page: tuple[str, bytes]) -> None:
        """Keep a page, if it is still of the current state and there is room."""
        if state is self.state and asked.common and len(self.pages) < self.kept_max:
            self.pages[asked] = page


@dataclass(frozen=True, slots=True)
class Pages:
    """Renders the state that the getters return."""

    get_state: GetState
    get_detail: GetDetail
    get_history: GetHistory
    assets: Mapping[str, Asset]
    templates: Environment
    renderings: Renderings = field(default_factory=Renderings)

    async def respond(self, request: Request, asked: Asked) -> Response:
        """Answer with a page, with 304 if the browser has it, or with 404 if there is no such model."""
        state = self.get_state()
        if asked.root is not None and self.get_detail(asked.root) is None:
            page = self.templates.get_template("missing.html").render(
                asked=asked, state=state, versioned=self.versioned
            )
            return HTMLResponse(page, 404, HEADERS)
        known = self.renderings.get(state, asked)
        etag, content = known if known is not None else await self._render(state, asked)
        headers = HEADERS | {"ETag": etag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match", "").removeprefix("W/") == etag.removeprefix("W/"):
            return Response(status_code=304, headers=headers)
        return HTMLResponse(content, headers=headers)

    async def _render(self, state: State, asked: Asked) -> tuple[str, bytes]:
        root = asked.root or (state.models[0].root if state.models else None)
        detail = None if root is None else self.get_detail(root)
        facts: dict[str, object] = {}
        if detail is not None:
            history = await self.get_history(root, asked.window)
            facts = {
                "cells": view.cells(detail.blocks),
                "held": view.held(detail.blocks),
                "use": view.use(detail, state.network),
                "past": view.past(history, broken=detail.summary.status == "broken"),
                "servers": view.servers(detail, text=asked.q, block=asked.block, everything=asked.everything),
            }
        text = self.templates.get_template("page.html").render(
            asked=asked, state=state, detail=detail, versioned=self.versioned, **facts
        )
        content = text.encode()
        page = f'W/"{hashlib.sha256(content).hexdigest()[:24]}"', content
        self.renderings.put(state, asked, page)
        return page

    def versioned(self, name: str) -> str:
        """Return where an asset is, below the base."""
        return f"/static/{name}?v={self.assets[name].digest}"

    def asset(self, name: str) -> Response:
        """Answer with a file of `static/`."""
        asset = self.assets.get(name)
        if asset is None:
            return PlainTextResponse("there is no such file\n", 404, HEADERS)
        headers = HEADERS | {"Cache-Control": "public, max-age=31536000, immutable"}
        return Response(asset.content, headers=headers, media_type=asset.media_type)


def router(get_state: GetState, get_detail: GetDetail, get_history: GetHistory) -> APIRouter:
    """Make the page's routes.

    get_state returns the same object until something changes. get_detail returns None for a root that it does not know,
    and get_history where there is none to read.
    """
    pages = Pages(get_state, get_detail, get_history, load_assets(), make_environment())
    routes = APIRouter(include_in_schema=False)

    @routes.api_route("/", methods=["GET", "HEAD"])
    @routes.api_route("/models/{root}", methods=["GET", "HEAD"])
    async def page(
        request: Request,
        root: str | None = None,
        q: Annotated[str, Query(max_length=64)] = "",  # no name and no peer id is longer
        block: Annotated[Block | None, Query()] = None,
        window: Window = "24h",
        all: bool = False,
    ) -> Response:
        base = request.scope.get("root_path", "")
        return await pages.respond(request, Asked(root, base, window, q.strip(), block, all))

    @routes.api_route("/static/{name:path}", methods=["GET", "HEAD"])
    async def static(name: str) -> Response:
        return pages.asset(name)

    return routes


def load_assets() -> Mapping[str, Asset]:
    """Read `static/`: only the files named here are ever served, so that no name leads out of it."""
    folder = resources.files("swarm.monitor") / "static"
    media_types = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assets = {}
    for name in (*SCRIPTS, *STYLES, "icon.svg"):
        content = (folder / name).read_bytes()
        media_type = media_types[name.rpartition(".")[2]]
        assets[name] = Asset(content, media_type, hashlib.sha256(content).hexdigest()[:16])
    return assets


def make_environment() -> Environment:
    """Make the templates' environment: everything is escaped, and a name that is not given is an error."""
    environment = Environment(
        loader=PackageLoader("swarm.monitor"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(wording.FILTERS)
    environment.globals.update(scripts=SCRIPTS, styles=STYLES, meanings=view.MEANINGS, reaches=view.REACHES)
    return environment
