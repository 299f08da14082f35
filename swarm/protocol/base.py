"""What all messages share: their base, and the kinds of field that several have."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from swarm.events import printable

TEXT_MAX = 300

PeerId = Annotated[str, Field(pattern=r"^[1-9A-HJ-NP-Za-km-z]{40,60}$")]
SessionId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Epoch = Annotated[int, Field(ge=0, le=1 << 31)]
Milliseconds = Annotated[int, Field(ge=0, le=24 * 3600 * 1000)]


def _printable(text: object) -> object:
    return printable(text) if isinstance(text, str) else text


Text = Annotated[str, Field(max_length=TEXT_MAX), BeforeValidator(_printable)]  # people read it on their terminals


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", ser_json_inf_nan="constants")
