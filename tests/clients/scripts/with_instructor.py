"""instructor: an object by tool call and by schema."""

import sys

import instructor
import openai
from pydantic import BaseModel

url, model = sys.argv[1:3]


class City(BaseModel):
    name: str
    people: int


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0), mode=mode)
    messages = [{"role": "user", "content": 'Say: {"name": "Rome", "people": 3}'}]
    city = client.chat.completions.create(model=model, messages=messages, response_model=City, max_retries=0)
    assert city.model_dump() == {"name": "Rome", "people": 3}, mode  # its class is one of instructor's own
