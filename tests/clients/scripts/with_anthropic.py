"""anthropic: messages, streams, tools, counted tokens, errors."""

import sys

import anthropic

url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
HELLO = [{"role": "user", "content": "Say: All is well."}]
ASKED = [{"role": "user", "content": "What is the weather in Rome?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "now", "input_schema": PARAMETERS}

answer = client.messages.create(model=model, max_tokens=50, messages=HELLO, system="Be brief.")
assert answer.content[0].text == "All is well."
assert answer.stop_reason == "end_turn"
assert answer.usage.output_tokens > 0
assert client.messages.create(model=model, max_tokens=1, messages=HELLO).stop_reason == "max_tokens"
stopped = client.messages.create(model=model, max_tokens=50, messages=HELLO, stop_sequences=["wel"])
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "wel")

with client.messages.stream(model=model, max_tokens=50, messages=HELLO) as stream:
    assert "".join(stream.text_stream) == "All is well."
    assert stream.get_final_message().stop_reason == "end_turn"

answer = client.messages.create(
    model=model, max_tokens=99, messages=ASKED, tools=[WEATHER], tool_choice={"type": "any"}
)
call = next(block for block in answer.content if block.type == "tool_use")
assert answer.stop_reason == "tool_use"
assert (call.name, call.input) == ("weather", {"city": "Rome"})
result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
turns = [*ASKED, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
assert client.messages.create(model=model, max_tokens=99, messages=turns, tools=[WEATHER]).content[0].text == (
    "The tool says: sunny"
)
with client.messages.stream(model=model, max_tokens=99, messages=ASKED, tools=[WEATHER]) as stream:
    call = next(block for block in stream.get_final_message().content if block.type == "tool_use")
    assert call.input == {"city": "Rome"}

counted = client.messages.count_tokens(model=model, messages=HELLO, system="Be brief.").input_tokens
assert counted > client.messages.count_tokens(model=model, messages=HELLO).input_tokens > 0
try:
    client.messages.create(model="other", max_tokens=5, messages=HELLO)
except anthropic.NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error"
else:
    raise AssertionError("an unknown model has an answer")
