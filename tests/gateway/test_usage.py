"""The usage of an upstream's answer is read however its bytes are cut, and leaves streams that did not ask for it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.gateway.usage import Reader, Usage, UsageLimits, asking

TOLD = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
CHAT = "/v1/chat/completions"


def event(body, end="\n\n"):
    return f"data: {json.dumps(body)}{end}".encode()


def text(word, **more):
    return {"choices": [{"delta": {"content": word}}], **more}


ALONE = event({"choices": [], "usage": TOLD})
DONE = b"data: [DONE]\n\n"


def read(parts, **options):
    reader = Reader(**{"is_stream": True, "hides": True} | options)
    return b"".join(reader.feed(part) for part in parts) + reader.close(), reader


def counts(usage):
    return usage.prompt, usage.cached, usage.output


@given(st.data())
def test_cuts_of_a_stream_change_nothing(data):
    end = data.draw(st.sampled_from(["\n\n", "\r\n\r\n", "\r\r"]))
    plain = event(text("a"), end) + b": waiting" + end.encode() + event(text("b"), end)
    whole = plain + event({"choices": [], "usage": TOLD}, end) + b"data: [DONE]" + end.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=20)))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    shown, reader = read(parts)
    assert shown.replace(b"\r", b"\n").replace(b"\n", b"") == (plain + b"data: [DONE]").replace(b"\r", b"\n").replace(
        b"\n", b""
    )
    assert counts(reader.usage) == (7, 2, 3)
    assert read(parts, hides=False)[0] == whole


def test_usage_within_other_chunks_is_taken_out_of_them():
    parts = [event(text("é", usage=None)), event(text("b", usage=TOLD)), DONE]
    shown, reader = read(parts)
    assert [json.loads(line[6:]) for line in shown.decode().split("\n\n")[:2]] == [text("é"), text("b")]
    assert shown.endswith(DONE)
    assert counts(reader.usage) == (7, 2, 3)


def test_usage_of_responses_and_of_whole_answers_is_read():
    told = {"input_tokens": 5, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 9}}
    stream = event({"type": "response.completed", "response": {"usage": told}})
    assert counts(read([stream], hides=False)[1].usage) == (5, 5, 4)
    whole = json.dumps({"choices": [], "usage": TOLD}).encode()
    shown, reader = read([whole[:9], whole[9:]], is_stream=False)
    assert shown == whole
    assert counts(reader.usage) == (7, 2, 3)


@pytest.mark.parametrize("told", [-1, 1 << 41, 1.5, True, "7", None, [], {}])
def test_usage_that_is_none_is_not_counted(told):
    bad = {**TOLD, "completion_tokens": told}
    _, reader = read([event(text("a")), event({"choices": [], "usage": bad}), event({"usage": 5}), b"data: {\n\n"])
    assert reader.usage is None
    assert counts(reader.counted) == (0, 0, 4)


def test_long_events_pass_unread_and_are_not_kept():
    limits = UsageLimits(kept_bytes_max=200)
    long = event(text("x" * 1000, usage=TOLD))
    parts = [long[i : i + 50] for i in range(0, len(long), 50)]
    shown, reader = read([*parts, ALONE], limits=limits)
    assert shown == long
    assert counts(reader.usage) == (7, 2, 3)
    whole = json.dumps({"text": "x" * 1000, "usage": TOLD}).encode()
    shown, reader = read([whole[:500], whole[500:]], is_stream=False, limits=limits)
    assert (shown, reader.usage) == (whole, None)


def test_stream_is_asked_for_its_usage_unless_it_tells_it_anyway():
    stream = {"stream": True, "stream_options": {"include_obfuscation": False}}
    asked = {"include_obfuscation": False, "include_usage": True}
    assert asking(stream, CHAT) == {"stream": True, "stream_options": asked}
    assert asking({"stream": True}, CHAT) == {"stream": True, "stream_options": {"include_usage": True}}
    for body in ({"stream": False}, {}, {"stream": True, "stream_options": {"include_usage": True}}):
        assert asking(body, CHAT) is None
    assert asking(stream, "/v1/responses") is None
    assert Usage().cached == 0
