"""The chat page: one document, and the files of `static/` that it loads.

    GET /                        the page; a browser asks each time whether it is still the same
    GET /static/{digest}/{name}  its style, modules and libraries; kept for ever, because a new version has a new digest

The digest is of all files together: a module's imports are relative, so that they have it, too. The policy in the
headers lets only these files run, and lets the page speak only to the gateway that it came from.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse

FILES = (
    "page.css",
    "theme.js",
    "page.js",
    "answers.js",
    "client.js",
    "history.js",
    "markdown.js",
    "messages.js",
    "sampling.js",
    "surface.js",
    "vendor/marked.js",
    "vendor/purify.js",
    "icon.svg",
)
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class Assets:
    """The page and its files. digest: of all of them, part of the files' addresses. etag: of the page."""

    page: bytes
    files: Mapping[str, bytes]
    digest: str
    etag: str


def load_assets() -> Assets:
    """Read `static/`. Only the files named here are ever served, so that no name leads out of it."""
    folder = resources.files("swarm.gateway") / "static"
    files = {name: (folder / name).read_bytes() for name in FILES}
    digest = hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in files.values())).hexdigest()[:16]
    page = (folder / "page.html").read_bytes().replace(b"{digest}", digest.encode())
    return Assets(page, files, digest, f'W/"{hashlib.sha256(page).hexdigest()[:24]}"')


def router() -> APIRouter:
    """Return the page's routes."""
    assets = load_assets()
    routes = APIRouter(include_in_schema=False)

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        headers = HEADERS | {"ETag": assets.etag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match", "").removeprefix("W/") == assets.etag.removeprefix("W/"):
            return Response(status_code=304, headers=headers)
        return HTMLResponse(assets.page, headers=headers)

    @routes.api_route("/static/{digest}/{name:path}", methods=["GET", "HEAD"])
    async def static(digest: str, name: str) -> Response:
        content = assets.files.get(name)
        if content is None or digest != assets.digest:
            return PlainTextResponse("there is no such file\n", 404, HEADERS)
        headers = HEADERS | {"Cache-Control": "public, max-age=31536000, immutable"}
        kinds = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
        return Response(content, headers=headers, media_type=kinds[name.rpartition(".")[2]])

    return routes
