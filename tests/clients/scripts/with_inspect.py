"""inspect-ai: an evaluation of two samples, and one with a tool with --tools."""

import os
import sys

url, model = sys.argv[1:3]
os.environ |= {"SWARM_BASE_URL": url + "/v1", "SWARM_API_KEY": "none"}

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def weather():
    async def execute(city: str) -> str:
        """Tell the weather.

        Args:
            city: where
        """
        return f"sunny in {city}"

    return execute


def scored(samples, *solvers):
    task = Task(dataset=[Sample(input=asked, target=target) for asked, target in samples], solver=list(solvers))
    task.scorer = [includes()]
    (log,) = evaluate(task, model=f"openai-api/swarm/{model}", display="none", max_retries=0, log_dir="logs")
    assert log.status == "success", log.error
    return log.results.scores[0].metrics["accuracy"].value


assert scored([("Say: All is well.", "well"), ("Say: No.", "Yes")], generate()) == 0.5
if "--tools" in sys.argv:
    samples = [("What is the weather in Rome?", "sunny in Rome")]
    assert scored(samples, use_tools(weather()), generate()) == 1
