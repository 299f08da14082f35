"""openai-python: models, chat, streams, tools, schemas, completions, responses, errors."""

import json
import sys

import openai
from pydantic import BaseModel

url, model = sys.argv[1:]
parts = set(sys.argv[3:])
client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
HELLO = [{"role": "user", "content": "Say: All is well."}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "now", "parameters": PARAMETERS}}
ASKED = [{"role": "user", "content": "What is the weather in Rome?"}]


class City(BaseModel):
    name: str
    people: int


CITY = [{"role": "user", "content": 'Say: {"name": "Rome", "people": 3}'}]


def models():
    assert [each.id for each in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def chat():
    answer = client.chat.completions.create(model=model, messages=HELLO, seed=1, temperature=0.5, stop=["zzz"])
    assert answer.choices[0].message.content == "All is well."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    several = client.chat.completions.create(model=model, messages=HELLO, n=3, logprobs=True, top_logprobs=2)
    assert [len(choice.logprobs.content[0].top_logprobs) for choice in several.choices] == [2, 2, 2]


def stream():
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(model=model, messages=HELLO, stream=True, stream_options=options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "All is well."
    assert chunks[-1].usage.completion_tokens > 0
    with client.chat.completions.stream(model=model, messages=HELLO) as events:
        assert events.get_final_completion().choices[0].message.content == "All is well."


def parse():
    answer = client.chat.completions.parse(model=model, messages=CITY, response_format=City)
    assert answer.choices[0].message.parsed == City(name="Rome", people=3)


def tools():
    answer = client.chat.completions.create(model=model, messages=ASKED, tools=[WEATHER], tool_choice="required")
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    answer = client.chat.completions.create(model=model, messages=[*ASKED, message, result], tools=[WEATHER])
    assert answer.choices[0].message.content == "The tool says: sunny"
    with client.chat.completions.stream(model=model, messages=ASKED, tools=[WEATHER]) as events:
        (call,) = events.get_final_completion().choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Rome"}


def completions():
    answer = client.completions.create(model=model, prompt=["a", "b"], max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1]
    scored = client.completions.create(model=model, prompt="Say this", max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].text == "Say this"
    assert scored.choices[0].logprobs.token_logprobs[0] is None
    pieces = client.completions.create(model=model, prompt="a", max_tokens=4, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces)


def errors():
    for wrong, kind in (
        ({"model": "other", "messages": HELLO}, openai.NotFoundError),
        ({"model": model, "messages": HELLO, "temperature": 9}, openai.BadRequestError),
        ({"model": model, "messages": [{"role": "user", "content": "word " * 9000}]}, openai.BadRequestError),
    ):
        try:
            client.chat.completions.create(**wrong)
        except kind as error:
            assert error.body["message"]
        else:
            raise AssertionError(f"{kind.__name__} did not come")


def responses():
    answer = client.responses.create(model=model, input="Say: All is well.")
    assert answer.output_text == "All is well."
    assert answer.usage.output_tokens > 0
    with client.responses.stream(model=model, input="Say: All is well.") as events:
        kinds = [event.type for event in events]
        assert events.get_final_response().output_text == "All is well."
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


def responses_tools():
    weather = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    answer = client.responses.create(model=model, input=ASKED, tools=[weather], store=False)
    call = next(item for item in answer.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    turns = [*ASKED, call, result]
    answer = client.responses.create(model=model, input=turns, tools=[weather], store=False)
    assert answer.output_text == "The tool says: sunny"


def responses_parse():
    parsed = client.responses.parse(model=model, input=CITY, text_format=City).output_parsed
    assert parsed == City(name="Rome", people=3)


for part in (models, chat, stream, parse, tools, completions, errors, responses, responses_tools, responses_parse):
    if not parts or part.__name__ in parts:
        part()
        print(part.__name__)
