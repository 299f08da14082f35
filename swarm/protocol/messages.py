"""Every message that crosses a channel, by `swarm.protocol.codec`: strict, frozen and bounded.

client -> hop          Open, Reroute, Replay, Inquiry, Attest, Close, Ping
hop -> client          Opened, Rerouted, Rebuilt, Progress, Attested, Leaving, Refused, Failed, Pong
along the route        Step (activations in), Output (the positions that the client wants), Rebuild (a replay)
                       Steps, Outputs (those of several sessions in one frame: `swarm.protocol.bundles`)
back along it          Rebuilt (to the sender of the past)
to and from an anchor  those of `swarm.protocol.meeting`
"""

from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from swarm.blocks import BLOCKS_MAX
from swarm.protocol.attest import Attest, Attested
from swarm.protocol.base import Epoch, Message, Milliseconds, PeerId, SessionId, Text
from swarm.protocol.marks import Marks
from swarm.protocol.meeting import AnyMeeting
from swarm.protocol.tensors import TensorMeta

ROWS_MAX = 256  # of one session's batch: all of them go through the model at once
POSITIONS_MAX = 1 << 22
ROLLBACK_MAX = 4096  # positions that one step takes back
STEPS_MAX = 1 << 40
BUNDLE_MAX = 128  # steps in one frame

LIFETIME_S_MAX = 24 * 3600
Lifetime = Annotated[int, Field(ge=1, le=LIFETIME_S_MAX)]
TokenBudget = Annotated[int, Field(ge=0, le=1 << 48)]
StepNumber = Annotated[int, Field(ge=0, le=STEPS_MAX)]

Value = TypeVar("Value")
Column = Annotated[tuple[Value, ...], Field(min_length=1, max_length=BUNDLE_MAX, fail_fast=True)]

RefusalCode = Literal[
    "no_room",  # in memory: come back after retry_after_ms
    "busy",  # too much, or too fast: come back after retry_after_ms
    "draining",  # this server is leaving
    "not_served",  # another model, numeric class or block range
    "not_yours",  # the session belongs to another key, or expects its activations from another peer
    "grant_over",  # its owner allowed it for less time, or for fewer tokens
    "out_of_order",  # a step before this one is missing
    "bad_activations",  # their shape or type is wrong, or they are infinite or no numbers
    "too_late",  # the client's patience ended before the step began
    "bad_request",  # the request is impossible, or makes no numbers
]

Blame = Literal["self", "next"]


class Hello(Message):
    """The first message of either side: proves the Ed25519 identity behind the handshake's key.

    `signature` covers the side's role and the handshake's hash (channel binding, section 11.2 of the Noise
    specification), so that it is worth nothing on any other channel. bundles: whether this side takes Steps and
    Outputs, which versions before 0.2 do not know. loads: the same of AnchorInquiry. moves: the same of Claim. skips:
    the same of a Step without activations. receipts: the same of Attest.
    """

    kind: Literal["hello"] = "hello"
    public_key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
    software: Annotated[str, Field(max_length=64)]
    bundles: bool = False
    loads: bool = False
    moves: bool = False
    skips: bool = False
    receipts: bool = False


class Ping(Message):
    """Asks for a Pong; keeps a quiet channel alive."""

    kind: Literal["ping"] = "ping"
    nonce: Annotated[int, Field(ge=0, lt=1 << 53)]


class Pong(Message):
    """Answers a Ping, or is a keepalive without a Ping: with nonce 0, which no Ping has."""

    kind: Literal["pong"] = "pong"
    nonce: Annotated[int, Field(ge=0, lt=1 << 53)]


class Open(Message):
    """Opens a session on one hop. The key that sends it controls the session from then on.

    positions_max: the longest that the session may get. rollback_max: the most positions that a step takes back.
    batch, positions_soon: rows, and positions of each, that it will have soon: a hop without room for them refuses.
    previous: the only peer whose activations count; None for the client itself.
    next_record: the signed announcement (base64) of the only peer that gets the outputs; None for the client itself.
    relay: the client gets them, and hands them on to the next hop, which this one cannot reach; no next_record then.
    after_step: the session is behind this step already. rebuild: its past until then comes by Rebuild messages, and
    steps wait until it is complete.
    tenant: of a peer that opens sessions for several users, whose session this is: their prompts take turns within the
    peer's share. It means nothing to a server but whether two are the same.
    lifetime_s, tokens_max: no hop pushes into the session later than that, or more than so many tokens of all rows
    together, rebuilt ones included. Every Reroute grants anew.
    marks: of the prompt that the session begins with (`swarm.protocol.marks`): the hop may have its past already.
    receipt: the hop is to note what `swarm.protocol.receipts` needs; Attest asks for it.
    """

    kind: Literal["open"] = "open"
    session: SessionId
    epoch: Epoch
    root: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    numeric_class: Annotated[str, Field(max_length=64)]
    start: Annotated[int, Field(ge=0, le=BLOCKS_MAX)]
    stop: Annotated[int, Field(ge=0, le=BLOCKS_MAX)]
    positions_max: Annotated[int, Field(ge=1, le=POSITIONS_MAX)]
    rollback_max: Annotated[int, Field(ge=0, le=ROLLBACK_MAX)]
    batch: Annotated[int, Field(ge=1, le=ROWS_MAX)] = 1
    positions_soon: Annotated[int, Field(ge=0, le=POSITIONS_MAX)] = 0
    previous: PeerId | None = None
    next_record: Annotated[str, Field(max_length=4096)] | None = None
    relay: bool = False
    after_step: StepNumber = 0
    rebuild: bool = False
    tenant: Annotated[str, Field(pattern=r"^[0-9a-f]{1,32}$")] | None = None
    marks: Marks | None = None
    receipt: bool | None = None
    lifetime_s: Lifetime = LIFETIME_S_MAX
    tokens_max: TokenBudget | None = None


class Opened(Message):
    """The hop holds the session, and is connected to the next one.

    held: positions of the marked prompt that it has, None for none: the first step keeps so many at most.
    """

    kind: Literal["opened"] = "opened"
    session: SessionId
    epoch: Epoch
    window: Annotated[int, Field(ge=1, le=64)]
    held: Annotated[int, Field(ge=1, le=POSITIONS_MAX)] | None = None


class Reroute(Message):
    """Changes a session's neighbours on a hop that goes on. Only its owner may, and only with a higher epoch.

    reset: forget the past, which comes anew by Rebuild messages. The others as in Open.
    """

    kind: Literal["reroute"] = "reroute"
    session: SessionId
    epoch: Epoch
    previous: PeerId | None = None
    next_record: Annotated[str, Field(max_length=4096)] | None = None
    relay: bool = False
    reset: bool = False
    after_step: StepNumber = 0
    lifetime_s: Lifetime = LIFETIME_S_MAX
    tokens_max: TokenBudget | None = None


class Rerouted(Message):
    """The hop has its new neighbours. journal: whether it can replay its outputs to the next one."""

    kind: Literal["rerouted"] = "rerouted"
    session: SessionId
    epoch: Epoch
    journal: bool


class Replay(Message):
    """Asks a hop to send its journal's past, as it was right after `step`, before `stop`, to the next `hops` hops."""

    kind: Literal["replay"] = "replay"
    session: SessionId
    epoch: Epoch
    step: StepNumber
    hops: Annotated[int, Field(ge=1, le=BLOCKS_MAX)]
    stop: Annotated[int, Field(ge=1, le=POSITIONS_MAX)] | None = None


class Rebuild(Message):
    """A piece of a session's past, on its way to `hops` hops that have none: they compute it and hand it on.

    start: its first position, of `total` in all.
    """

    kind: Literal["rebuild"] = "rebuild"
    session: SessionId
    epoch: Epoch
    start: Annotated[int, Field(ge=0, le=POSITIONS_MAX)]
    total: Annotated[int, Field(ge=1, le=POSITIONS_MAX)]
    hops: Annotated[int, Field(ge=1, le=BLOCKS_MAX)]
    hidden: TensorMeta
    positions: TensorMeta | None = None
    mask: TensorMeta | None = None


class Rebuilt(Message):
    """The first `stop` positions of a session's past are there again, so that more may come.

    To the sender of the past: at all hops that it is on its way to. To the owner, when they are all: at this one.
    """

    kind: Literal["rebuilt"] = "rebuilt"
    session: SessionId
    epoch: Epoch
    stop: Annotated[int, Field(ge=1, le=POSITIONS_MAX)]


class Inquiry(Message):
    """Asks a hop how far a session is, of which the client has not heard for a while."""

    kind: Literal["inquiry"] = "inquiry"
    session: SessionId
    epoch: Epoch


class Progress(Message):
    """How far a session is at one hop: whether it is alive, at work, or waits in vain.

    applied: the last step that was computed and sent on. length: positions, those under way included.
    under_way: steps and pieces of the past that wait for the processor or have it.
    jobs_done: jobs that the hop has computed since it started; while it rises, a busy hop is a healthy one.
    quiet_ms: for how long no byte has come from the sender of this session's activations.
    """

    kind: Literal["progress"] = "progress"
    session: SessionId
    epoch: Epoch
    applied: StepNumber
    length: Annotated[int, Field(ge=0, le=POSITIONS_MAX)]
    under_way: Annotated[int, Field(ge=0, le=1 << 20)]
    jobs_done: Annotated[int, Field(ge=0, lt=1 << 53)]
    quiet_ms: Annotated[int, Field(ge=0, lt=1 << 53)]


class Leaving(Message):
    """The server is about to leave: it goes on serving for a while, and the client should move the session."""

    kind: Literal["leaving"] = "leaving"
    session: SessionId
    epoch: Epoch


class Step(Message):
    """Activations of some positions on their way round, applied in order and idempotently.

    keep: positions that stay; a smaller number than there are is a rollback.
    rows: before the step, row i of the batch becomes the former row rows[i] (reorder, repeat, select).
    budget_ms: the rest of the step's time, for the client's deadline.
    want: how many trailing positions the client wants back from the last hop.
    positions: the tokens' position ids, where they are not keep, keep + 1, ...
    mask: the new columns of the 2-D attention mask, where they are not all ones.
    skips: steps before it that are not computed yet, and of which it keeps no position, are answered empty.
    hidden: None for a step that was skipped at a hop before.
    """

    kind: Literal["step"] = "step"
    session: SessionId
    epoch: Epoch
    step: StepNumber
    keep: Annotated[int, Field(ge=0, le=POSITIONS_MAX)]
    rows: (
        Annotated[tuple[Annotated[int, Field(ge=0, lt=ROWS_MAX)], ...], Field(max_length=ROWS_MAX, fail_fast=True)]
        | None
    ) = None
    budget_ms: Milliseconds
    want: Annotated[int, Field(ge=0, le=POSITIONS_MAX)]
    skips: bool | None = None
    hidden: TensorMeta | None = None
    positions: TensorMeta | None = None
    mask: TensorMeta | None = None


class Output(Message):
    """The last hop's answer to one step: the positions that were wanted, or just that it is done or was skipped."""

    kind: Literal["output"] = "output"
    session: SessionId
    epoch: Epoch
    step: StepNumber
    hidden: TensorMeta | None = None


class Steps(Message):
    """Steps of one position and one row each, of several sessions, as if each came by itself, in this order.

    Columns of the fields of Step. hidden: [steps, 1, hidden_size], row i is that of step i.
    """

    kind: Literal["steps"] = "steps"
    sessions: Column[SessionId]
    epochs: Column[Epoch]
    steps: Column[StepNumber]
    keeps: Column[Annotated[int, Field(ge=0, le=POSITIONS_MAX)]]
    budgets_ms: Column[Milliseconds]
    wants: Column[Annotated[int, Field(ge=0, le=POSITIONS_MAX)]]
    hidden: TensorMeta

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_columns(self.hidden, self.sessions, self.epochs, self.steps, self.keeps, self.budgets_ms, self.wants)
        return self


class Outputs(Message):
    """Outputs of one position and one row each, of several sessions, as if each came by itself, in this order.

    Columns of the fields of Output. hidden: [outputs, 1, hidden_size], row i is that of output i.
    """

    kind: Literal["outputs"] = "outputs"
    sessions: Column[SessionId]
    epochs: Column[Epoch]
    steps: Column[StepNumber]
    hidden: TensorMeta

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_columns(self.hidden, self.sessions, self.epochs, self.steps)
        return self


def _check_columns(hidden: TensorMeta, *columns: tuple[object, ...]) -> None:
    """Raise ValueError where columns differ in length, or have another than the tensor."""
    if len(hidden.shape) != 3 or hidden.shape[1] != 1 or {len(column) for column in columns} != {hidden.shape[0]}:
        raise ValueError("columns and tensor are not of the same length")


class Refused(Message):
    """A request is declined and nothing of it was applied. Not a failure of the hop."""

    kind: Literal["refused"] = "refused"
    session: SessionId
    epoch: Epoch
    step: StepNumber | None = None
    code: RefusalCode
    why: Text
    retry_after_ms: Milliseconds | None = None


class Failed(Message):
    """A session cannot go on at this hop. blame: whose fault it is, as far as this hop can tell."""

    kind: Literal["failed"] = "failed"
    session: SessionId
    epoch: Epoch
    step: StepNumber | None = None
    blame: Blame
    why: Text


class Close(Message):
    """Ends a session and frees its lease."""

    kind: Literal["close"] = "close"
    session: SessionId


AnyMessage = Annotated[
    Hello
    | Ping
    | Pong
    | Open
    | Opened
    | Reroute
    | Rerouted
    | Replay
    | Rebuild
    | Rebuilt
    | Inquiry
    | Progress
    | Leaving
    | Step
    | Output
    | Steps
    | Outputs
    | Refused
    | Failed
    | Close
    | AnyMeeting
    | Attest
    | Attested,
    Field(discriminator="kind"),
]
