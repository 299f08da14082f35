"""Steps of several sessions in one frame.

Sessions whose steps were computed together travel together: to the same next hop, or back to the same client. A frame
for each would be encoded, sealed, written, read, opened and validated by itself, which takes longer than computing a
small span's share. So a channel puts what leaves it in one turn of the loop into one frame, and takes it apart on the
other side. Nothing behind the channel knows of it: order, repair and retransmission are those of single steps.

    fits(message)              whether a message may travel so: one position of one row, and nothing beside it
    bundled(parts)             messages as they are to be sent: runs of the same kind and width become one
    unbundled(message, ...)    the messages of a frame: of most frames there is one
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from swarm.activations import Activations
from swarm.protocol.base import Message
from swarm.protocol.messages import BUNDLE_MAX, AnyMessage, Output, Outputs, Step, Steps
from swarm.protocol.tensors import TensorMeta

Part = tuple[Message, Activations | None]


def fits(message: Message) -> bool:
    """Whether a message may travel in a frame with others."""
    match message:
        case Step():
            alone = (message.rows, message.positions, message.mask, message.skips) == (None, None, None, None)
            return alone and message.hidden is not None and message.hidden.shape[:2] == (1, 1)
        case Output():
            return message.hidden is not None and message.hidden.shape[:2] == (1, 1)
    return False


def bundled(parts: Sequence[Part]) -> Iterator[Part]:
    """Put neighbouring messages of one kind, dtype, width and coding into one. All of them fit."""
    for _, run in groupby(parts, key=lambda part: (type(part[0]), _hidden(part[0]))):
        rest = list(run)
        while rest:
            some, rest = rest[:BUNDLE_MAX], rest[BUNDLE_MAX:]
            yield some[0] if len(some) == 1 else _joined(some)


def unbundled(message: AnyMessage, activations: Activations | None) -> Sequence[tuple[AnyMessage, Activations | None]]:
    """Take a frame's message apart. The fields were validated with the frame. The tensors share its memory.

    The numbers of all steps are looked at together, which takes as long as those of one.
    """
    if message.kind not in ("steps", "outputs"):  # a tenth of the time of isinstance
        return ((message, activations),)
    assert isinstance(message, (Steps, Outputs))
    assert activations is not None
    finite = activations.is_finite()
    of_all = message.hidden
    one = TensorMeta.model_construct(dtype=of_all.dtype, shape=(1, *of_all.shape[1:]), coding=of_all.coding)
    rows = activations.hidden.split(1)
    singles: list[Step | Output] = []
    singles += _outputs_of(message, one) if isinstance(message, Outputs) else _steps_of(message, one)
    return [(single, Activations(hidden, finite=finite)) for single, hidden in zip(singles, rows, strict=True)]


def _outputs_of(message: Outputs, hidden: TensorMeta) -> Iterator[Output]:
    for session, epoch, step in zip(message.sessions, message.epochs, message.steps, strict=True):
        yield Output.model_construct(session=session, epoch=epoch, step=step, hidden=hidden)


def _steps_of(message: Steps, hidden: TensorMeta) -> Iterator[Step]:
    columns = message.sessions, message.epochs, message.steps, message.keeps, message.budgets_ms, message.wants
    for session, epoch, step, keep, budget_ms, want in zip(*columns, strict=True):
        yield Step.model_construct(
            session=session, epoch=epoch, step=step, keep=keep, budget_ms=budget_ms, want=want, hidden=hidden
        )


def _hidden(message: Message) -> TensorMeta | None:
    assert isinstance(message, (Step, Output))
    return message.hidden


def _joined(parts: Sequence[Part]) -> Part:
    import torch  # noqa: PLC0415 - a process that only shakes hands and pings does without

    hidden = torch.cat([activations.hidden for _, activations in parts if activations is not None])
    first = _hidden(parts[0][0])
    assert first is not None
    shape = (len(parts), *first.shape[1:])
    meta = TensorMeta.model_construct(dtype=first.dtype, shape=shape, coding=first.coding)
    activations = Activations(hidden)
    outputs = [message for message, _ in parts if isinstance(message, Output)]
    if outputs:
        return _outputs(outputs, meta), activations
    steps = [message for message, _ in parts if isinstance(message, Step)]
    return _steps(steps, meta), activations


def _outputs(outputs: Sequence[Output], hidden: TensorMeta) -> Outputs:
    return Outputs.model_construct(
        sessions=tuple(each.session for each in outputs),
        epochs=tuple(each.epoch for each in outputs),
        steps=tuple(each.step for each in outputs),
        hidden=hidden,
    )


def _steps(steps: Sequence[Step], hidden: TensorMeta) -> Steps:
    return Steps.model_construct(
        sessions=tuple(each.session for each in steps),
        epochs=tuple(each.epoch for each in steps),
        steps=tuple(each.step for each in steps),
        keeps=tuple(each.keep for each in steps),
        budgets_ms=tuple(each.budget_ms for each in steps),
        wants=tuple(each.want for each in steps),
        hidden=hidden,
    )
