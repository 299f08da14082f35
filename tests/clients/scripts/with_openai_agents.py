"""openai-agents: an agent with a tool, with its default model of the responses endpoint, or chat's with --chat."""

import asyncio
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

url, name = sys.argv[1:3]
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
Model = OpenAIChatCompletionsModel if "--chat" in sys.argv else OpenAIResponsesModel
model = Model(name, client)


class City(BaseModel):
    name: str
    people: int


@function_tool
def weather(city: str) -> str:
    """Tell the weather."""
    return f"sunny in {city}"


async def main():
    agent = Agent("assistant", instructions="Help.", model=model, tools=[weather])
    result = await Runner.run(agent, "What is the weather in Rome?")
    assert result.final_output == "The tool says: sunny in Rome"
    streamed = Runner.run_streamed(agent, "What is the weather in Rome?")
    kinds = {event.type async for event in streamed.stream_events()}
    assert "raw_response_event" in kinds
    assert streamed.final_output == "The tool says: sunny in Rome"
    typed = Agent("geographer", model=model, output_type=City)
    result = await Runner.run(typed, 'Say: {"name": "Rome", "people": 3}')
    assert result.final_output == City(name="Rome", people=3)


asyncio.run(main())
