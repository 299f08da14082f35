"""Ollama's answers as the OpenAPI document describes them. `swarm.gateway.api.ollama` writes them by hand."""

from typing import Any, Literal

from pydantic import BaseModel


class Call(BaseModel):
    """A call of a tool."""

    class Function(BaseModel):
        """The function that is called."""

        index: int
        name: str
        arguments: dict[str, Any]

    id: str
    function: Function


class Message(BaseModel):
    """An answer, or a piece of one."""

    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[Call] = []


class Likely(BaseModel):
    """A token with its probability."""

    token: str
    logprob: float
    bytes: list[int]


class Logprob(Likely):
    """A token of the output, and the likeliest in its place."""

    top_logprobs: list[Likely]


class Answer(BaseModel):
    """The fields of both endpoints' answers. Durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"]
    logprobs: list[Logprob] = []
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0


class ChatAnswer(Answer):
    """The answer of `/api/chat`."""

    message: Message


class GenerateAnswer(Answer):
    """The answer of `/api/generate`."""

    response: str
    thinking: str = ""


class Details(BaseModel):
    """The model's kind. Sizes are unknown: the weights are on the swarm's servers."""

    parent_model: str
    format: Literal["safetensors"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Listed(BaseModel):
    """A model in a list."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Loaded(Listed):
    """A model that is loaded."""

    expires_at: str
    size_vram: int
    context_length: int


class Tags(BaseModel):
    """The answer of `/api/tags`."""

    models: list[Listed]


class Running(BaseModel):
    """The answer of `/api/ps`."""

    models: list[Loaded]


class Shown(BaseModel):
    """The answer of `/api/show`."""

    modelfile: str
    parameters: str
    template: str
    modified_at: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking"]]


class Version(BaseModel):
    """The answer of `/api/version`."""

    version: str
