"""The gateway lets in whom it should, holds slots as long as streams, bounds bodies, and logs no text."""

import asyncio
import io
import json
import logging
import re
import socket
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlparse

import httpx
import pytest
import structlog
from starlette.responses import Response

from swarm.commands import configure_logging
from swarm.errors import BadConfiguration
from swarm.gateway.admission import AdmissionLimits, GenerationLimits
from swarm.gateway.app import Gateway, GatewayLimits
from swarm.gateway.doors import DoorOptions, Failsafe, is_allowed, is_local
from swarm.gateway.health import Readiness
from swarm.gateway.keys import KeyLimits, Keys, digest_of
from swarm.gateway.loading import ModelOptions
from swarm.gateway.serve import GatewayArguments, doors_of
from swarm.gateway.watching import BodyLimits
from swarm.options import Reading
from tests.gateway.scripted import NAME, ScriptedModels, running, scripted_model
from tests.support.swarms import eventually

HELLO = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"
LISTS = ("/v1/models", "/api/tags", "/api/ps")
MARKER = "xylophone-7731"


@contextmanager
def served(script=lambda _: "All is well.", token_s=0.0, **options):
    model = scripted_model(script, token_s=token_s)
    with running(Gateway(ScriptedModels(model), **options)) as url:
        yield url, model.backend


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    entries = {
        "ada": {"sha256": [digest_of("key-of-ada")]},
        "bob": {"sha256": [digest_of("key-of-bob")], "models": ["org/other"]},
        "cyd": {"sha256": [digest_of("key-of-cyd")], "tokens_per_minute": 10},
        "dan": {"sha256": [digest_of("key-of-dan")], "requests_per_minute": 1},
    }
    path.write_text(json.dumps(entries))
    path.chmod(0o600)
    return Keys(path, time.monotonic)


@pytest.fixture(scope="module")
def keyed(keys):
    with served(doors=DoorOptions(keys=keys)) as (url, backend):
        yield url, backend


@pytest.fixture(scope="module")
def local():
    with served(doors=DoorOptions(on_loopback=True, origins=frozenset({"https://chat.example"}))) as (url, _):
        yield url


def post(url, key=None, path=CHAT, body=HELLO, **headers):
    own = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(url + path, json=body, headers=own | headers, timeout=30)


# Keys


@pytest.mark.parametrize("header", [{"Authorization": "Bearer key-of-ada"}, {"x-api-key": "key-of-ada"}])
def test_key_in_any_dialects_header_names_the_owner(keyed, header):
    url, backend = keyed
    assert httpx.post(url + CHAT, json=HELLO, headers=header).status_code == 200
    assert backend.asked[-1].owner == "ada"


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer no"}, {"Authorization": "Basic key-of-ada"}])
def test_request_without_a_known_key_gets_401(keyed, header):
    url, backend = keyed
    before = len(backend.asked)
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/openapi.json")):
        response = httpx.request(method, url + path, json=HELLO if method == "POST" else None, headers=header)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    assert len(backend.asked) == before


def test_page_needs_no_key(keyed):
    url, _ = keyed
    page = httpx.get(url + "/")
    styles = re.findall(r"static/\S+?\.css", page.text)
    assert (page.status_code, len(styles)) == (200, 1)
    assert httpx.get(f"{url}/{styles[0]}").status_code == 200


@pytest.mark.parametrize(("key", "why"), [(None, "a key is needed"), ("no", "is not known")])
def test_request_is_told_whether_its_key_is_missing_or_unknown(keyed, key, why):
    assert why in post(keyed[0], key).json()["error"]["message"]


def test_unknown_key_has_no_body_read(keyed):
    """A stranger must not make the gateway hold bytes."""
    address = urlparse(keyed[0])
    with socket.create_connection((address.hostname, address.port), timeout=5) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n\r\n{")
        assert b" 401 " in connection.recv(100)


def test_key_with_a_list_of_models_may_name_no_other(keyed):
    response = post(keyed[0], "key-of-bob")
    assert (response.status_code, response.json()["error"]["code"]) == (403, "model_not_allowed")


def test_lists_show_the_models_of_the_key_alone(keyed):
    def listed(key):
        bodies = [httpx.get(keyed[0] + path, headers={"x-api-key": key}).json() for path in LISTS]
        return [entry.get("id") or entry["name"] for body in bodies for entry in body.get("data", body.get("models"))]

    assert listed("key-of-ada") == [NAME, f"{NAME}:latest", f"{NAME}:latest"]
    assert listed("key-of-bob") == []
    one = httpx.get(f"{keyed[0]}/v1/models/{NAME}", headers={"x-api-key": "key-of-bob"})
    assert (one.status_code, one.json()["error"]["code"]) == (403, "model_not_allowed")


ASKED = {
    CHAT: (HELLO, '"code":"invalid_api_key"', "[DONE]"),
    "/v1/completions": ({"model": NAME, "prompt": "Hello"}, '"code":"invalid_api_key"', "[DONE]"),
    "/v1/responses": ({"model": NAME, "input": "Hello"}, "event: response.failed", "response.completed"),
    "/v1/messages": ({**HELLO, "max_tokens": 9}, '"type":"authentication_error"', "message_stop"),
    "/api/chat": (HELLO, '{"error":"this key', '"done":true'),
}


@pytest.fixture
def lent(tmp_path):
    """A gateway whose model begins and then says no more, and a file with a key that is removed by a call."""
    path = tmp_path / "keys.json"

    def put(*names):
        path.write_text(json.dumps({name: {"sha256": [digest_of(f"key-of-{name}")]} for name in names}))
        path.chmod(0o600)

    put("ada", "bob")
    keys, pauses = Keys(path, time.monotonic, KeyLimits(look_s=0.02)), []

    def script(_):
        pauses.append(Future())
        return ["All is ", pauses[-1]]

    with served(script, doors=DoorOptions(keys=keys)) as (url, backend):
        yield url, backend, lambda: put("bob"), pauses


@pytest.mark.parametrize("path", ASKED)
def test_stream_of_a_revoked_key_ends_with_an_error_event(lent, path):
    url, backend, revoke, _ = lent
    body, error, end = ASKED[path]
    sent = {"json": {**body, "stream": True}, "headers": {"x-api-key": "key-of-ada"}, "timeout": 20}
    with httpx.stream("POST", url + path, **sent) as answer:
        parts = answer.iter_text()
        text = next(parts)
        revoke()
        text += "".join(parts)
    assert answer.status_code == 200
    assert error in text
    assert end not in text
    eventually(lambda: backend.running == 0, 5)


def test_whole_answer_of_a_revoked_key_is_401(lent):
    url, backend, revoke, pauses = lent
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(post, url, f"key-of-{name}") for name in ("ada", "bob")]
        eventually(lambda: backend.running == 2, 5)
        revoke()
        answer = asked[0].result(20)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        for each in pauses:
            each.done() or each.set_result(None)
        assert asked[1].result(20).status_code == 200


def test_health_needs_no_key_and_tells_reasons_with_one(keyed):
    url, _ = keyed
    for path in ("/healthz", "/health"):
        assert httpx.get(url + path).json() == {"ok": True}
    assert httpx.get(url + "/readyz").json() == {"ready": True}
    assert "models" in httpx.get(url + "/readyz", headers={"x-api-key": "key-of-ada"}).json()


def test_key_with_a_list_of_models_learns_of_no_other(keys):
    async def readiness():
        return Readiness(True, {NAME: "", "org/other": "no route"}, ("the file of keys is gone",))

    def get(path, name):
        return httpx.get(url + path, headers={"x-api-key": f"key-of-{name}"})

    with served(doors=DoorOptions(keys=keys), readiness=readiness) as (url, _):
        assert post(url, "key-of-ada").status_code == 200
        assert [get("/metrics", name).status_code for name in ("ada", "bob")] == [200, 403]
        assert NAME in get("/metrics", "ada").text
        assert NAME not in get("/metrics", "bob").text
        told = [get("/readyz", name).json() for name in ("ada", "bob")]
    assert [(list(each["models"]), len(each["problems"])) for each in told] == [
        ([NAME, "org/other"], 1),
        (["org/other"], 0),
    ]


def arguments(host="127.0.0.1", **options):
    return GatewayArguments(
        listen=(host, 0),
        models=(),
        reading=Reading((), "public", None, None, None),
        options=ModelOptions(),
        **options,
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "gateway.example"])
def test_other_addresses_need_keys_or_a_word(host, tmp_path):
    with pytest.raises(BadConfiguration, match="--no-keys"):
        doors_of(arguments(host))
    assert doors_of(arguments(host, is_open=True)) == DoorOptions()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_loopback_needs_no_keys_and_checks_names(host):
    assert doors_of(arguments(host)) == DoorOptions(on_loopback=True)


# Failures


async def test_answer_that_fails_midway_is_followed_by_no_other():
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("broken")

    async def send(message):
        sent.append(message["status"])

    failsafe = Failsafe(app, lambda path, problem: Response(status_code=problem.status))
    with pytest.raises(ValueError, match="broken"):
        await failsafe({"type": "http", "path": CHAT, "state": {}}, None, send)
    assert sent == [200]


# Browsers


@pytest.mark.parametrize(
    "host", ["localhost:8000", "LOCALHOST", "127.0.0.1:1", "[::1]:8000", "chat.localhost", "[::1]"]
)
def test_names_of_this_machine_are_local(host):
    assert is_local(host)


@pytest.mark.parametrize("host", ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1"])
def test_other_names_are_not_local(host):
    assert not is_local(host)


def test_rebound_name_is_refused_on_loopback(local):
    response = post(local, Host="evil.example")
    assert (response.status_code, response.json()["error"]["code"]) == (403, "host_not_allowed")
    assert post(local, Host="localhost:9").status_code == 200


def test_page_of_another_site_is_refused(local):
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        response = post(local, Origin=origin)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in response.headers
    assert post(local, Origin=local).status_code == 200


def test_allowed_page_may_call_with_its_headers(local):
    origin = {"Origin": "https://chat.example"}
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = httpx.options(local + CHAT, headers=origin | asked)
    assert preflight.status_code == 200
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    response = post(local, **origin)
    assert response.headers["access-control-allow-origin"] == "https://chat.example"
    assert "x-request-id" in response.headers["access-control-expose-headers"]


def test_preflight_is_not_answered_by_default(keyed):
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    response = httpx.options(keyed[0] + CHAT, headers=asked)
    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers


def test_origin_is_compared_whole():
    allowed = frozenset({"https://chat.example"})
    assert is_allowed("https://chat.example", "x", allowed)
    assert not is_allowed("https://chat.example.evil", "x", allowed)
    assert not is_allowed("file://", "", frozenset())
    assert not is_allowed("http://", "", frozenset())
    assert is_allowed("http://LOCALHOST:8000", "localhost:8000", frozenset())
    assert not is_allowed("ftp://localhost:8000", "localhost:8000", frozenset())
    assert is_allowed("null", "x", frozenset({"*"}))


# Bodies


@pytest.mark.parametrize("body", [b"{", b'{"a": }', b"[" * 100_000, b'{"a":' * 300 + b"1" + b"}" * 300, b"\xff"])
def test_body_that_is_no_json_or_too_deep_gets_400(local, body):
    response = httpx.post(local + CHAT, content=body, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


def test_bodies_under_way_have_a_bound_together():
    limits = GatewayLimits(bodies=BodyLimits(bodies_bytes_max=3000))
    with served(token_s=0.05, limits=limits, script=lambda _: "word " * 100) as (url, backend):
        large = {**HELLO, "messages": [{"role": "user", "content": "x" * 2000}]}
        with httpx.stream("POST", url + CHAT, json={**large, "stream": True}, timeout=30) as response:
            assert response.status_code == 200
            refused = post(url, body=large)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        eventually(lambda: backend.running == 0, 5)
        assert post(url, body={**large, "max_tokens": 1}).status_code == 200


def test_body_that_does_not_come_is_given_up():
    with served(limits=GatewayLimits(bodies=BodyLimits(body_s=0.2))) as (url, _):
        address = urlparse(url)
        with socket.create_connection((address.hostname, address.port), timeout=5) as connection:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
            assert b" 408 " in connection.recv(100)


def test_failure_inside_is_told_in_the_dialects_form():
    def script(_):
        raise RuntimeError("a secret path")

    with served(script) as (url, _):
        response = post(url)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"].startswith("req_")


# Admission over HTTP


def streaming(url, **headers):
    return httpx.stream("POST", url + CHAT, json={**HELLO, "stream": True}, headers=headers, timeout=30)


def test_slot_is_held_until_the_stream_has_ended():
    limits = GatewayLimits(admission=AdmissionLimits(running_max=1, tenant_waiting_max=0))
    with served(token_s=0.02, limits=limits, script=lambda _: "word " * 200) as (url, backend):
        with streaming(url) as response:
            assert response.status_code == 200
            refused = post(url)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert httpx.get(url + "/v1/models").status_code == 200  # lists wait for nothing
        eventually(lambda: backend.running == 0, 5)
        assert post(url, body={**HELLO, "max_tokens": 1}).status_code == 200


def test_computed_tokens_are_charged_to_their_key(keyed):
    assert post(keyed[0], "key-of-cyd").status_code == 200
    refused = post(keyed[0], "key-of-cyd")
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 60  # 32 tokens of prompt and 5 of output, of 10 a minute
    assert post(keyed[0], "key-of-ada").status_code == 200


def test_requests_a_minute_are_counted_for_their_key(keyed):
    assert [post(keyed[0], "key-of-dan").status_code for _ in range(2)] == [200, 429]


def test_sequences_of_one_request_take_turns():
    most = []

    def script(_):
        most.append(backend.running)
        return "ok"

    limits = GatewayLimits(generations=GenerationLimits(running_max=2))
    with served(script, token_s=0.01, limits=limits) as (url, backend):
        body = {"model": NAME, "prompt": [[5, 6]] * 10, "n": 2}
        assert len(post(url, path="/v1/completions", body=body).json()["choices"]) == 20
    assert len(most) == 20
    assert max(most) == 2


# Logs


@contextmanager
def logs(level):
    """Everything that is logged, as a command with this level would print it."""
    printed, before, root = io.StringIO(), structlog.get_config(), logging.getLogger()
    handlers, threshold = root.handlers[:], root.level
    root.handlers.clear()
    sys.stderr, stderr = printed, sys.stderr
    try:
        configure_logging(level)
        root.setLevel(logging.DEBUG)  # libraries at their most talkative, except for this test's own client
        for name in ("httpx", "httpcore"):
            logging.getLogger(name).setLevel(logging.WARNING)
        yield printed
    finally:
        sys.stderr = stderr
        structlog.configure(**before)
        root.handlers[:] = handlers
        root.setLevel(threshold)


def test_no_text_is_logged_even_at_debug(keys):
    marked = [{"role": "user", "content": MARKER}]

    def script(generation):
        if len(generation.prompt) > 200:
            raise RuntimeError("broken")
        return f"You said {MARKER}."

    with logs("debug") as printed, served(script, doors=DoorOptions(keys=keys)) as (url, _):
        bodies = [
            {**HELLO, "messages": marked},
            {**HELLO, "messages": marked, "stream": True},
            {**HELLO, "messages": marked * 40},  # a failure inside
            {**HELLO, "messages": [{"role": MARKER, "content": MARKER}]},
            {**HELLO, "messages": marked, "tools": MARKER},
            {**HELLO, "model": MARKER, "messages": marked},
        ]
        statuses = [post(url, "key-of-ada", body=body).status_code for body in bodies]
        assert statuses == [200, 200, 500, 400, 400, 404]
        post(url, "key-of-ada", path=f"/{MARKER}?q={MARKER}")
        post(url, MARKER)
        httpx.post(url + CHAT, content=f'{{"{MARKER}'.encode(), headers={"x-api-key": "key-of-ada"})
    text = printed.getvalue()
    assert text.count('"event": "request"') == 9
    assert MARKER not in text
    assert "key-of-ada" not in text


def test_log_line_has_tenant_model_status_and_tokens(keys):
    with logs("info") as printed, served(doors=DoorOptions(keys=keys)) as (url, _):
        answer = post(url, "key-of-ada")
    lines = [json.loads(line) for line in printed.getvalue().splitlines() if '"event": "request"' in line]
    (line,) = lines
    usage = answer.json()["usage"]
    assert (line["tenant"], line["model"], line["status"], line["path"]) == ("ada", NAME, 200, CHAT)
    assert (line["prompt"], line["output"], line["id"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
        answer.headers["x-request-id"],
    )
    assert 0 < line["ttft_s"] <= line["took_s"] < 30


def test_client_that_leaves_while_it_waits_leaves_the_queue():
    limits = GatewayLimits(admission=AdmissionLimits(running_max=1))
    with served(token_s=0.02, limits=limits, script=lambda _: "word " * 300) as (url, backend):

        async def leave():
            async with httpx.AsyncClient() as client:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(url + CHAT, json=HELLO, timeout=0.3)

        with streaming(url):
            asyncio.run(leave())
            waiting = "swarm_gateway_requests_waiting "
            eventually(lambda: f"{waiting}0.0" in httpx.get(url + "/metrics").text, 5)
        eventually(lambda: backend.running == 0, 5)
        assert len(backend.asked) == 1
