"""langchain-openai: invoke, stream, tools, structured output, and the responses endpoint with --responses."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

url, model = sys.argv[1:3]
common = {"model": model, "base_url": url + "/v1", "api_key": "none", "max_retries": 0}
chat = ChatOpenAI(**common, use_responses_api="--responses" in sys.argv)


class City(BaseModel):
    """A city."""

    name: str
    people: int


@tool
def weather(city: str) -> str:
    """Tell the weather."""
    return f"sunny in {city}"


def text_of(message):
    return message.content if isinstance(message.content, str) else "".join(part["text"] for part in message.content)


answer = chat.invoke("Say: All is well.")
assert text_of(answer) == "All is well."
assert answer.usage_metadata["output_tokens"] > 0
assert "".join(text_of(piece) for piece in chat.stream("Say: All is well.")) == "All is well."

asked = HumanMessage("What is the weather in Rome?")
called = chat.bind_tools([weather]).invoke([asked])
(call,) = called.tool_calls
assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
told = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
assert text_of(chat.bind_tools([weather]).invoke([asked, called, told])) == "The tool says: sunny in Rome"

for method in ("json_schema", "function_calling"):
    structured = chat.with_structured_output(City, method=method)
    assert structured.invoke('Say: {"name": "Rome", "people": 3}') == City(name="Rome", people=3), method
