"""ollama: chat, generate, streams, models, errors; tools and schemas with --tools."""

import json
import sys

import ollama

url, model = sys.argv[1:3]
client = ollama.Client(url)
HELLO = [{"role": "user", "content": "Say: All is well."}]
ASKED = [{"role": "user", "content": "What is the weather in Rome?"}]


def weather(city: str) -> str:
    """Tell the weather.

    Args:
      city: where
    """
    return "sunny" if city == "Rome" else "rain"


answer = client.chat(model, HELLO, options=ollama.Options(temperature=0.3, seed=1, num_predict=50), keep_alive="5m")
assert (answer.message.content, answer.done, answer.done_reason) == ("All is well.", True, "stop")
assert answer.eval_count > 0
assert answer.total_duration > 0

*pieces, last = list(client.chat(model + ":latest", HELLO, stream=True))
assert "".join(piece.message.content for piece in pieces) == "All is well."
assert (last.done, last.message.content) == (True, "")

assert client.generate(model, "Say: All is well.", system="Be brief.", think=False).response == "All is well."
assert "".join(piece.response for piece in client.generate(model, "Say: Yes.", stream=True)) == "Yes."
scored = client.generate(model, "Say: Yes.", raw=True, logprobs=True, top_logprobs=2)
assert len(scored.logprobs[0].top_logprobs) == 2

assert [each.model for each in client.list().models] == [model + ":latest"]
assert [each.model for each in client.ps().models] == [model + ":latest"]
shown = client.show(model)
assert "completion" in shown.capabilities
assert any(name.endswith(".context_length") for name in shown.modelinfo)

for wrong, status in (("other", 404), (model, 400)):
    try:
        client.chat(wrong, [{"role": "user", "content": "x", "images": [b"png"]}])
    except ollama.ResponseError as error:
        assert (error.status_code, bool(error.error)) == (status, True)
    else:
        raise AssertionError(f"{wrong} has an answer")

if "--tools" in sys.argv:
    called = client.chat(model, ASKED, tools=[weather])
    (call,) = called.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Rome"})
    told = {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}
    answer = client.chat(model, [*ASKED, called.message, told], tools=[weather])
    assert answer.message.content == "The tool says: sunny"
    schema = {"type": "object", "properties": {"people": {"type": "integer"}}, "required": ["people"]}
    city = client.generate(model, 'Say: {"people": 3}', format=schema)
    assert json.loads(city.response) == {"people": 3}
