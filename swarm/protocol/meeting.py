"""The messages by which an anchor brings a caller and a hidden peer together (`swarm.net.anchor`).

hidden peer -> anchor       Moor
anchor -> hidden peer       Moored, Called, Meet
caller -> anchor            Call
anchor -> caller            Calling, Uncalled, Meet
any peer -> anchor          AnchorInquiry
anchor -> any peer          AnchorLoad, Uncalled
caller -> hidden peer       Claim
hidden peer -> caller       Claimed
"""

from typing import Annotated, Literal

from pydantic import Field

from swarm.protocol.base import Message, Milliseconds, PeerId, Text

CallName = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$", description="chosen by the caller, and new for each call")]
Token = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="said by a half: a connection that belongs to it")]
HostPort = Annotated[str, Field(max_length=64)]
Peers = Annotated[int, Field(ge=0, le=1 << 20)]  # how many, or how many pairs
SPEED_MAX = 1 << 40  # bytes/s; a larger one is told so
Speed = Annotated[int, Field(ge=0, le=SPEED_MAX)]

Proof = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="of the two ends of a channel: its exporter's")]

LOAD = "load"  # in the place of a call's name, which has other letters

UncalledCause = Literal[
    "busy",  # too many meetings: come back after retry_after_ms
    "away",  # the callee is not moored here
    "refused",  # this side does not do that
]


class Moor(Message):
    """Keep this line, and tell of callers. record: the sender's own signed announcement, in hex."""

    kind: Literal["moor"] = "moor"
    record: Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=4096)]


class Moored(Message):
    """The anchor will. seen: from where the line comes, as the anchor sees it."""

    kind: Literal["moored"] = "moored"
    seen: HostPort


class Call(Message):
    """Bring us together with a peer that is moored here.

    port: at which the caller can be dialled from outside, 0 where it cannot. back: the token to say there.
    """

    kind: Literal["call"] = "call"
    call: CallName
    callee: PeerId
    port: int = Field(default=0, ge=0, le=65535)
    back: Token


class Called(Message):
    """A peer calls. token: for the half that comes to the anchor. reach, back: where the caller can be dialled."""

    kind: Literal["called"] = "called"
    call: CallName
    token: Token
    caller: PeerId
    reach: HostPort = ""
    back: Token


class Calling(Message):
    """The callee has been told. token: for the caller's half."""

    kind: Literal["calling"] = "calling"
    call: CallName
    token: Token


class Uncalled(Message):
    """The anchor does not do that. call: empty where it refuses a mooring, LOAD where it does not tell its load."""

    kind: Literal["uncalled"] = "uncalled"
    call: Annotated[str, Field(max_length=32)] = ""
    cause: UncalledCause
    why: Text
    retry_after_ms: Milliseconds | None = None


class Meet(Message):
    """Both halves are here, and joined. Both sides are told at the same moment, as far as the anchor can.

    token: of the receiver's own half. peer: from where the other half comes. local: the other one's address in its own
    network, where both come from one. rtt_ms: of the two halves together.
    """

    kind: Literal["meet"] = "meet"
    token: Token
    peer: HostPort
    local: HostPort = ""
    rtt_ms: int = Field(ge=0, le=60_000)


class AnchorInquiry(Message):
    """Asks an anchor for its load. It goes only to a peer whose Hello says that it knows this message."""

    kind: Literal["anchor_inquiry"] = "anchor_inquiry"


class AnchorLoad(Message):
    """The anchor's load: sums over all peers, some seconds old.

    meetings: that wait for a half. pairs: relayed now. relayed_bytes_per_s: the mean since the question before.
    refused: since its start. The fields with max are its limits.
    """

    kind: Literal["anchor_load"] = "anchor_load"
    moored: Peers
    moored_max: Peers
    meetings: Peers
    meetings_max: Peers
    pairs: Peers
    pairs_max: Peers
    relayed_bytes_per_s: Speed
    relayed_bytes_per_s_max: Speed
    refused: Annotated[int, Field(ge=0, lt=1 << 53)]


class Claim(Message):
    """The channel of this name, between the same two processes, goes on over this connection (`swarm.net.transfer`).

    It goes only to a peer whose Hello says that it knows this message. Nothing follows it on this channel.
    """

    kind: Literal["claim"] = "claim"
    channel: Proof
    proof: Proof


class Claimed(Message):
    """It does, once its caller has moved. Nothing follows it on this channel."""

    kind: Literal["claimed"] = "claimed"
    proof: Proof


AnyMeeting = Moor | Moored | Call | Called | Calling | Uncalled | Meet | AnchorInquiry | AnchorLoad | Claim | Claimed
