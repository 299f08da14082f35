"""pydantic-ai: an agent with a tool, structured output by tool and by schema, a stream."""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, name = sys.argv[1:3]
Model = OpenAIResponsesModel if "--responses" in sys.argv else OpenAIChatModel
model = Model(name, provider=OpenAIProvider(base_url=url + "/v1", api_key="none"))


class City(BaseModel):
    name: str
    people: int


async def main():
    agent = Agent(model)

    @agent.tool_plain
    def weather(city: str) -> str:
        return f"sunny in {city}"

    result = await agent.run("What is the weather in Rome?")
    assert result.output == "The tool says: sunny in Rome"
    for form in (ToolOutput(City), NativeOutput(City)):
        result = await Agent(model, output_type=form).run('Say: {"name": "Rome", "people": 3}')
        assert result.output == City(name="Rome", people=3), form
    async with Agent(model).run_stream("Say: All is well.") as stream:
        assert await stream.get_output() == "All is well."


asyncio.run(main())
