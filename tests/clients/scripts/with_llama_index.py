"""llama-index-llms-openai-like: complete, chat, stream, tools."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

url, model = sys.argv[1:3]
common = {"model": model, "api_base": url + "/v1", "api_key": "none", "max_retries": 0, "context_window": 8192}
llm = OpenAILike(**common, is_chat_model=True, is_function_calling_model=True)


def weather(city: str) -> str:
    """Tell the weather."""
    return f"sunny in {city}"


hello = [ChatMessage(role="user", content="Say: All is well.")]
assert llm.complete("Say: All is well.").text == "All is well."
assert llm.chat(hello).message.content == "All is well."
assert "".join(piece.delta or "" for piece in llm.stream_chat(hello)) == "All is well."
assert OpenAILike(**common, is_chat_model=False).complete("Say").text
answer = llm.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg="What is the weather in Rome?")
(call,) = llm.get_tool_calls_from_response(answer)
assert (call.tool_name, call.tool_kwargs) == ("weather", {"city": "Rome"})
