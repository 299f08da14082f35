"""Whole requests go to the swarm or to an upstream, never to both; what an upstream sends passes as it is."""

import asyncio
import json
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.config import Settings, UpstreamSettings
from swarm.errors import BadConfiguration, HopFailed, NoRoute, PromptTooLong, Refused, StepTimeout
from swarm.gateway.app import Gateway
from swarm.gateway.doors import DoorOptions
from swarm.gateway.keys import KeyLimits, Keys, digest_of
from swarm.gateway.upstream import HEADER, UpstreamLimits, Upstreams, configured, order_of, polled
from tests.gateway.scripted import NAME, ScriptedModels, running, scripted_model

pytestmark = pytest.mark.real_time

CHAT = "/v1/chat/completions"
HELLO = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]}
STREAM = b'data: {"choices": [{"delta": {"content": "from upstream"}}]}\n\ndata: [DONE]\n\n'
OPEN = DoorOptions()


class Whole:
    """A server of OpenAI's API that holds a model whole."""

    def __init__(self):
        self.models = ["theirs"]
        self.asked = []
        self.headers = []
        self.status = 200
        self.body = STREAM
        self.length = None  # what the header says; None: the truth
        self.hangs = None  # an event: an answer that is cut pauses until it is set
        self.close = lambda: None


@contextmanager
def whole():
    state = Whole()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self._send(200, json.dumps({"data": [{"id": name} for name in state.models]}).encode())

        def do_POST(self):
            state.headers.append(dict(self.headers))
            state.asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self._send(state.status, state.body, state.length)

        def _send(self, status, body, length=None):
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Content-Length", str(length or len(body)))
            self.send_header("X-Private", "no business of clients")
            self.end_headers()
            self.wfile.write(body)
            if state.hangs is not None and length is not None:
                self.wfile.flush()
                state.hangs.wait(20)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def close():
        server.shutdown()
        server.server_close()
        thread.join(10)

    state.close = close
    try:
        yield state, f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        close()


@contextmanager
def gateway(url, when="fallback", script=lambda _: "from the swarm", ours=NAME, key_file=None, doors=OPEN):
    """A gateway with one upstream, which it has asked for its models."""
    settings = UpstreamSettings(url=url, models={ours: "theirs"}, when=when, key_file=key_file)
    model = scripted_model(script)
    with running(Gateway(ScriptedModels(model), doors=doors), [settings]) as served:
        yield served, model.backend


@pytest.mark.parametrize("stream", [1, "true", [True]])
def test_a_stream_is_asked_for_by_true_alone(stream):
    """Some upstreams take more for true, and their streams would be charged as whole answers are."""
    with whole() as (upstream, url), gateway(url, when="prefer") as (served, _):
        answer = httpx.post(served + CHAT, json={**HELLO, "stream": stream}, timeout=30)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
        assert not upstream.asked


def put(folder, keys):
    """Write a file of keys."""
    (path := folder / "keys.json").write_text(json.dumps(keys))
    path.chmod(0o600)
    return path


def test_each_order_is_as_documented():
    assert order_of(is_here=True, when=None) == ("swarm",)
    assert order_of(is_here=True, when="prefer") == ("upstream", "swarm")
    assert order_of(is_here=True, when="fallback") == ("swarm", "upstream")
    assert order_of(is_here=False, when="fallback") == order_of(is_here=False, when="prefer") == ("upstream",)


@given(st.booleans(), st.sampled_from([None, "prefer", "fallback"]))
def test_no_side_is_tried_twice(is_here, when):
    order = order_of(is_here=is_here, when=when)
    assert len(order) == len(set(order)) > 0
    assert ("upstream" in order) == (when is not None)


def test_preferred_upstream_gets_the_whole_request(tmp_path):
    (key := tmp_path / "key").write_text("their-key\n")
    with whole() as (upstream, url), gateway(url, "prefer", key_file=key) as (served, backend):
        body = {**HELLO, "stream": True, "some_extension": {"a": [1]}}
        response = httpx.post(served + CHAT, json=body, headers={"Authorization": "Bearer mine", "x-api-key": "mine"})
        assert response.content == STREAM
        assert response.headers[HEADER] == "upstream"
        assert "x-private" not in response.headers
        assert upstream.asked == [("/v1/chat/completions", {**body, "model": "theirs"})]
        assert upstream.headers[0]["Authorization"] == "Bearer their-key"
        assert "mine" not in str(upstream.headers)
        assert "swarm_gateway_requests_total" in (found := httpx.get(served + "/metrics").text)
        assert f'model="{NAME}",path="{CHAT}",status="200"' in found
    assert backend.asked == []  # not behind the answer either: the gateway has ended


def test_swarm_answers_first_where_the_upstream_is_a_fallback():
    with whole() as (upstream, url), gateway(url) as (served, _):
        response = httpx.post(served + CHAT, json=HELLO)
        assert response.json()["choices"][0]["message"]["content"] == "from the swarm"
        assert response.headers[HEADER] == "swarm"
    assert upstream.asked == []


def test_upstream_without_a_key_is_sent_none():
    with whole() as (upstream, url), gateway(url, "prefer") as (served, _):
        httpx.post(served + CHAT, json=HELLO, headers={"Authorization": "Bearer mine"})
        assert "Authorization" not in upstream.headers[0]


def test_only_posts_are_sent_on():
    with whole() as (upstream, url), gateway(url, "prefer") as (served, _):
        assert httpx.request("GET", served + CHAT, json=HELLO).status_code == 405
    assert upstream.asked == []


@pytest.mark.parametrize(
    ("path", "more"), [("/v1/messages", {"max_tokens": 50}), ("/api/chat", {"stream": False})], ids=["messages", "chat"]
)
def test_other_dialects_are_answered_by_the_swarm(path, more):
    with whole() as (upstream, url), gateway(url, "prefer") as (served, _):
        assert "from the swarm" in httpx.post(served + path, json={**HELLO, **more}).text
    assert upstream.asked == []


@pytest.mark.parametrize("content", [b"", b"[]", b'{"model": 1}'])
def test_request_that_names_no_model_is_a_bad_one(content):
    with whole() as (upstream, url), gateway(url, "prefer") as (served, _):
        assert httpx.post(served + CHAT, content=content).status_code == 400
    assert upstream.asked == []


@pytest.mark.parametrize("error", [NoRoute("m", (3,)), Refused("peer", "0:4", "no_room", "full")])
@pytest.mark.parametrize("stream", [False, True])
def test_fallback_answers_where_the_swarm_has_no_way(error, stream):
    def script(_):
        raise error

    with whole() as (upstream, url), gateway(url, script=script) as (served, _):
        response = httpx.post(served + CHAT, json={**HELLO, "stream": stream})
        assert (response.status_code, response.content) == (200, STREAM)
        assert response.headers[HEADER] == "upstream"
        assert len(upstream.asked) == 1


@pytest.mark.parametrize("error", [StepTimeout("p", "0:4", 5.0), HopFailed("p", "0:4", "x"), PromptTooLong(9, 8, "m")])
def test_other_failures_of_the_swarm_stay_its_own(error):
    def script(_):
        raise error

    with whole() as (upstream, url), gateway(url, script=script) as (served, _):
        response = httpx.post(served + CHAT, json=HELLO)
        assert response.status_code >= 400
        assert response.headers[HEADER] == "swarm"
        assert upstream.asked == []


def test_answer_that_has_begun_is_never_continued_elsewhere():
    with whole() as (upstream, url), gateway(url, script=lambda _: ["All is", NoRoute("m", (3,))]) as (served, _):
        response = httpx.post(served + CHAT, json={**HELLO, "stream": True})
        assert '"error"' in response.text
        assert upstream.asked == []


def test_error_of_an_upstream_passes_as_it_is():
    with whole() as (upstream, url), gateway(url, "prefer") as (served, backend):
        upstream.status, upstream.body = 429, b'{"error": {"message": "slow down"}}'
        response = httpx.post(served + CHAT, json=HELLO)
        assert (response.status_code, response.content) == (429, upstream.body)
        assert backend.asked == []


@pytest.mark.parametrize("when", ["prefer", "fallback"])
def test_upstream_that_is_gone_counts_as_no_route(when):
    def script(_):
        if when == "fallback":
            raise NoRoute("m", (3,))
        return "from the swarm"

    with whole() as (upstream, url), gateway(url, when, script) as (served, _):
        upstream.close()
        response = httpx.post(served + CHAT, json=HELLO)
    if when == "prefer":
        assert (response.status_code, response.headers[HEADER]) == (200, "swarm")
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_route")
        assert response.headers["retry-after"] == "5"


def test_answer_that_breaks_off_has_no_clean_end():
    with whole() as (upstream, url), gateway(url, "prefer") as (served, _):
        upstream.body, upstream.length = STREAM[:20], len(STREAM)
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(served + CHAT, json={**HELLO, "stream": True})


def test_model_that_an_upstream_alone_has_is_listed_and_answered():
    with whole() as (_, url), gateway(url, ours="org/other") as (served, _):
        names = [model["id"] for model in httpx.get(served + "/v1/models").json()["data"]]
        assert names == [NAME, "org/other"]
        assert httpx.get(served + "/v1/models/org/other").status_code == 200
        assert httpx.post(served + CHAT, json={**HELLO, "model": "org/other"}).content == STREAM


def test_model_that_the_upstream_has_lost_is_the_swarms():
    with whole() as (upstream, url):
        upstream.models = []
        with gateway(url, "prefer") as (served, _):
            assert httpx.post(served + CHAT, json=HELLO).headers[HEADER] == "swarm"


# Tokens of a key

COUNTED = b'data: {"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 70}}\n\n'
WHOLE = b'{"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 70}}'


@pytest.mark.parametrize("kind", ["hidden", "asked for", "whole"])
def test_tokens_of_upstreams_are_charged_to_the_key(tmp_path, kind):
    path = put(tmp_path, {"ada": {"sha256": [digest_of("ada")], "tokens_per_minute": 100}})
    doors = DoorOptions(keys=Keys(path, time.monotonic))
    with whole() as (upstream, url), gateway(url, "prefer", doors=doors) as (served, _):
        text, end = STREAM.split(b"data: [DONE]")[0], b"data: [DONE]\n\n"
        upstream.body = WHOLE if kind == "whole" else text + COUNTED + end
        options = {"stream_options": {"include_usage": True}} if kind == "asked for" else {}
        body = {**HELLO, "stream": kind != "whole", **options}
        answer = httpx.post(served + CHAT, json=body, headers={"x-api-key": "ada"})
        assert answer.content == (STREAM if kind == "hidden" else upstream.body)
        is_asked = upstream.asked[0][1].get("stream_options") == {"include_usage": True}
        assert is_asked == (kind != "whole")
        refused = httpx.post(served + CHAT, json=body, headers={"x-api-key": "ada"})
        assert (refused.status_code, int(refused.headers["retry-after"])) == (429, pytest.approx(6, abs=1))


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_stream_of_an_upstream_ends_with_an_error_for_a_revoked_key(tmp_path, path):
    file = put(tmp_path, {"ada": {"sha256": [digest_of("ada")]}, "bob": {"sha256": [digest_of("bob")]}})
    doors = DoorOptions(keys=Keys(file, time.monotonic, KeyLimits(look_s=0.02)))
    with whole() as (upstream, url), gateway(url, "prefer", doors=doors) as (served, _):
        upstream.body, upstream.length, upstream.hangs = STREAM[:-14], len(STREAM), threading.Event()
        sent = {"json": {**HELLO, "stream": True}, "headers": {"x-api-key": "ada"}, "timeout": 20}
        with httpx.stream("POST", served + path, **sent) as answer:
            parts = answer.iter_raw()
            begun = next(parts)
            put(tmp_path, {"bob": {"sha256": [digest_of("bob")]}})
            rest = b"".join(parts)
        upstream.hangs.set()
    assert begun in STREAM
    assert b"[DONE]" not in begun + rest
    assert b'"code":"invalid_api_key"' in rest
    assert rest.startswith(b"event: error\n") == (path != CHAT)


# Settings


@pytest.mark.parametrize("url", ["https://api.example/v1", "http://10.0.0.1/v1", "http://localhost.example/v1"])
def test_prompts_leave_the_machine_only_when_it_is_said(url):
    given = {"url": url, "models": {NAME: "theirs"}}
    with pytest.raises(BadConfiguration, match="remote = true"):
        configured([UpstreamSettings(**given)])
    assert configured([UpstreamSettings(**given, remote=True)])


def test_missing_key_file_is_told_by_its_name(tmp_path):
    settings = UpstreamSettings(url="http://127.0.0.1/v1", models={NAME: "x"}, key_file=tmp_path / "none")
    with pytest.raises(BadConfiguration, match="none"):
        configured([settings])


def test_upstreams_come_from_the_settings_file(tmp_path, monkeypatch):
    (tmp_path / "swarm.toml").write_text(
        '[[gateway.upstream]]\nurl = "http://127.0.0.1:11434/v1"\nwhen = "prefer"\nmodels = { "org/name" = "llama" }\n'
    )
    monkeypatch.chdir(tmp_path)
    (upstream,) = Settings().gateway.upstream
    assert (upstream.when, upstream.models, upstream.remote) == ("prefer", {"org/name": "llama"}, False)


async def test_no_upstreams_are_none():
    async with polled([]) as upstreams:
        assert upstreams is None


@asynccontextmanager
async def asking(answers):
    """Upstreams that are asked every 15 s, of one that gives these answers in turn."""

    def answer(_):
        status, names = answers.pop(0)
        return httpx2.Response(status, json={"data": [{"id": name} for name in names]})

    settings = UpstreamSettings(url="http://127.0.0.1/v1", models={NAME: "theirs"})
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
        upstreams = Upstreams(configured([settings]), client, UpstreamLimits(poll_s=15.0))
        running = asyncio.create_task(upstreams.run())
        yield upstreams
        running.cancel()


@pytest.mark.virtual_clock
async def test_models_of_an_upstream_come_and_go():
    answers = [(200, ["theirs"]), (200, ["another"]), (200, ["theirs"]), (500, ["theirs"]), (200, [])]
    seen = []
    async with asking(answers) as upstreams:
        await asyncio.sleep(1)
        for _ in range(5):
            seen.append(upstreams.names)
            await asyncio.sleep(15)
    assert seen == [[], [NAME], [], [NAME], []]
    assert answers == []
