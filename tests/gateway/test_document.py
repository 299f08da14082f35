"""The gateway's OpenAPI document: every answer is as it says, and no request that it allows or forbids gives a 500."""

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis.strategies import booleans
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from swarm.gateway.document import PATH
from tests.gateway.scripted import NAME, scripted

HELLO = [{"role": "user", "content": "Hello"}]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def url():
    with scripted(lambda _: "All is well.") as (url, _):
        yield url


def operations(url):
    schema = schemathesis.openapi.from_url(url + PATH)
    return {f"{each.ok().method} {each.ok().path}": each.ok() for each in schema.get_all_operations()}


def check(operation, examples):
    settings = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    def call(case, is_answered):
        if isinstance(case.body, dict) and is_answered:  # random names never are
            case.body |= {"model": NAME, **({"messages": HELLO} if "messages" in case.body else {})}
        if case.path_parameters:
            case.path_parameters = dict.fromkeys(case.path_parameters, NAME)
        case.call_and_validate(checks=CHECKS, timeout=30)

    settings(hypothesis.given(case=operation.as_strategy(), is_answered=booleans())(call))()


def test_document_has_every_dialect_and_its_streams(url):
    document = httpx.get(url + PATH).json()
    assert {"/v1/chat/completions", "/v1/completions", "/api/chat", "/api/generate"} < set(document["paths"])
    for path, kind in (("/v1/chat/completions", "text/event-stream"), ("/api/chat", "application/x-ndjson")):
        answers = document["paths"][path]["post"]["responses"]
        assert set(answers) == {"200", "4XX", "5XX"}
        assert set(answers["200"]["content"]) == {"application/json", kind}


@pytest.mark.slow("about a hundred requests, drawn at random for every operation")
def test_answers_are_as_the_document_says(url):
    tried = operations(url)
    assert len(tried) >= 10
    for operation in tried.values():
        check(operation, examples=8)


@pytest.mark.long
def test_many_answers_are_as_the_document_says(url):
    for operation in operations(url).values():
        check(operation, examples=300)
