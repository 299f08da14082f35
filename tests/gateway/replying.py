"""A gateway whose model answers with given events: dialects are tested with it, apart from templates' own formats."""

import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from swarm.gateway.answering import Model
from swarm.gateway.app import Gateway, GatewayLimits
from swarm.gateway.chat import Chat, Event, PromptDone, Reasoning, Text
from tests.gateway.scripted import ScriptedModels, running, scripted_model

CACHED = 4  # tokens of each prompt that a kept session had
THINKS = (Reasoning(0, "I need "), Reasoning(0, "a tool."), Text(0, "Let me "), Text(0, "look."))

Reply = Callable[[Chat], Sequence[Event | Exception]]
"""The events of an answer behind `PromptDone`, and in between errors that are raised."""


@dataclass(frozen=True)
class ReplyingModel(Model):
    """Renders its prompts, and answers as it is told; `chats` are those that it was asked."""

    reply: Reply
    chats: list[Chat] = field(default_factory=list)

    async def chat(self, chat: Chat) -> AsyncGenerator[Event, None]:
        self.chats.append(chat)
        yield PromptDone(0, await self.count(chat), CACHED)
        for each in self.reply(chat):
            if isinstance(each, Exception):
                raise each
            yield each

    def asked(self, response: httpx.Response) -> Chat:
        """Return the chat that an answered request has become."""
        assert response.status_code == 200, response.text
        return self.chats[-1]


@contextmanager
def replying(reply: Reply, limits: GatewayLimits | None = None) -> Iterator[tuple[str, ReplyingModel]]:
    """A running gateway with one model that replies. Yields its URL and the model."""
    base = scripted_model(lambda _: "")
    model = ReplyingModel(
        **{each.name: getattr(base, each.name) for each in dataclasses.fields(base) if each.init}, reply=reply
    )
    with running(Gateway(ScriptedModels(model), limits or GatewayLimits())) as url:
        yield url, model
