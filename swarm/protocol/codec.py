"""Reads and writes a frame's plaintext: a JSON header, which is a message, and the tensors that it describes."""

from pydantic import ConfigDict, TypeAdapter, ValidationError

from swarm.activations import Activations
from swarm.errors import InvalidMessage
from swarm.events import printable
from swarm.protocol.base import TEXT_MAX, Message
from swarm.protocol.messages import AnyMessage, Output, Outputs, Rebuild, Step, Steps
from swarm.protocol.tensors import decode_tensors, encode_tensor

HEADER_BYTES_MAX = 32 * 1024
ALIGNMENT = 16  # the tensors start at a multiple of it, so that they can be used where they lie

# Names of sessions come once: a cache of 16,384 of them would be memory for nothing.
_ADAPTER: TypeAdapter[AnyMessage] = TypeAdapter(AnyMessage, config=ConfigDict(cache_strings="keys"))


def encode(message: Message, activations: Activations | None = None) -> list[bytes | memoryview]:
    """Return the parts of a frame's plaintext: the header's length and text, then the tensors' bytes.

    activations: those that the message's TensorMeta fields describe.
    """
    header = message.model_dump_json(exclude_none=True).encode()
    padding = -(2 + len(header)) % ALIGNMENT
    length = len(header) + padding
    assert length <= HEADER_BYTES_MAX
    frame: list[bytes | memoryview] = [length.to_bytes(2, "big") + header + b" " * padding]
    if activations is not None:
        meta = message.hidden  # type: ignore[attr-defined]  # all messages with activations have it
        frame.append(encode_tensor(activations.hidden, None if meta is None else meta.coding))
        beside = activations.positions, activations.mask
        frame += [encode_tensor(tensor) for tensor in beside if tensor is not None]
    return frame


def decode(frame: memoryview) -> tuple[AnyMessage, Activations | None]:
    """Read one frame's plaintext. Returns the message and the activations that it describes, if any.

    The tensors share the frame's memory. Raises InvalidMessage.
    """
    if len(frame) < 2:
        raise InvalidMessage("frame", "it is empty")
    start = 2 + int.from_bytes(frame[:2], "big")
    if start > min(len(frame), 2 + HEADER_BYTES_MAX):
        raise InvalidMessage("frame", "the header's length is out of range")
    try:
        message = _ADAPTER.validate_json(bytes(frame[2:start]))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InvalidMessage("message", printable(f"{place}: {first['msg']}")[:TEXT_MAX]) from None
    if isinstance(message, (Step, Rebuild)) and message.hidden is not None:
        hidden, positions, mask = decode_tensors((message.hidden, message.positions, message.mask), frame[start:])
        assert hidden is not None
        return message, Activations(hidden, positions, mask)
    if isinstance(message, (Output, Steps, Outputs)) and message.hidden is not None:
        (hidden,) = decode_tensors((message.hidden,), frame[start:])
        assert hidden is not None
        return message, Activations(hidden)
    if start != len(frame):
        raise InvalidMessage(message.kind, "bytes behind the header")
    return message, None
