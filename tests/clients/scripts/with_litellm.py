"""litellm: each of the gateway's dialects by litellm's own provider."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it is fetched otherwise

import litellm

url, model = sys.argv[1:3]
HELLO = [{"role": "user", "content": "Say: All is well."}]
PROVIDERS = {
    "openai": {"model": f"openai/{model}", "api_base": url + "/v1"},
    "ollama_chat": {"model": f"ollama_chat/{model}", "api_base": url},
    "anthropic": {"model": f"anthropic/{model}", "api_base": url},
}
litellm.telemetry = False
for name in sys.argv[3:] or PROVIDERS:
    options = {**PROVIDERS[name], "api_key": "none", "messages": HELLO, "max_tokens": 50, "num_retries": 0}
    answer = litellm.completion(**options)
    assert answer.choices[0].message.content == "All is well.", name
    assert answer.usage.completion_tokens > 0, name
    pieces = [piece.choices[0].delta.content or "" for piece in litellm.completion(stream=True, **options)]
    assert "".join(pieces) == "All is well.", name
    print(name)
