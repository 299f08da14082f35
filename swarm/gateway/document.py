"""The gateway's OpenAPI document, `/openapi.json`: FastAPI's own, with errors and streams added.

Dialects write their answers by hand, so FastAPI knows nothing of them. The shape of errors is taken from an example.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from swarm.gateway.api.dialect import Dialect
from swarm.gateway.api.problems import Problem

PATH = "/openapi.json"  # clients of Ollama ask below /api
Json = dict[str, Any]


def documented(app: FastAPI, dialect_of: Callable[[str], Dialect]) -> None:
    """Let an app tell its document. dialect_of: returns the dialect that a path belongs to."""

    def document() -> Json:
        if app.openapi_schema is None:
            written = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path, operations in written["paths"].items():
                for operation in operations.values():
                    _complete(operation, dialect_of(path), written)
            app.openapi_schema = written
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign] # as FastAPI's documentation says


def _complete(operation: Json, dialect: Dialect, document: Json) -> None:
    answers = operation["responses"]
    answers.pop("422", None)  # the gateway says 400
    example = Problem(400, "invalid_request", "why")
    error = {"application/json": {"schema": shape(dialect.error_body(example))}}
    answers["4XX"] = {"description": "What is wrong with the request", "content": error}
    answers["5XX"] = {"description": "Why there is no answer", "content": error}
    if _may_stream(operation, document):
        answers["200"].setdefault("content", {"application/json": {"schema": {"type": "object"}}})
        answers["200"]["content"][dialect.stream_type] = {}


def _may_stream(operation: Json, document: Json) -> bool:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    name = body.get("$ref", "").rpartition("/")[2]
    return "stream" in document.get("components", {}).get("schemas", {}).get(name, {}).get("properties", {})


def shape(example: object) -> Json:
    """Return the JSON schema of values like an example: its objects have all their fields, None is anything."""
    match example:
        case Mapping():
            fields = {name: shape(value) for name, value in example.items()}
            return {"type": "object", "properties": fields, "required": list(fields)}
        case str():
            return {"type": "string"}
        case _:
            return {}
