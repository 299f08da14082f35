"""Every error that the swarm raises on purpose.

    SwarmError
    ├── UsageError               a wish of the caller that cannot be: commands exit 2
    │   ├── BadBlocks            a block range that is reversed, empty or out of range
    │   ├── ModelNotFound        no such directory or repository
    │   ├── UnsupportedCheckpoint   no safetensors, or files that do not fit together
    │   ├── UnsupportedArchitecture a family that cannot be split safely
    │   ├── PromptTooLong        more positions than the model or the session allows
    │   ├── AddressInUse         a port that another process listens on
    │   ├── IdentityInUse        another process holds the same identity file
    │   ├── BadRequest           a field of an HTTP request that cannot be answered
    │   └── BadConfiguration     a setting, a file or an environment variable
    ├── CheckpointError
    │   ├── ChecksumMismatch     a file differs from its manifest
    │   ├── RootMismatch         this checkpoint is not the one that was asked for
    │   └── DownloadFailed       the hub, the connection or the disk
    ├── NetworkError
    │   ├── Unreachable          no answer at these addresses
    │   ├── HandshakeFailed      the other side did not prove its identity
    │   ├── ProtocolMismatch     two major versions of the protocol: names the side that must upgrade
    │   ├── P2PFailed            the libp2p daemon does not run
    │   ├── TooBusy              a DHT node gets more requests than it answers; sent to the peer, raised for dial-backs
    │   ├── ChannelClosed        the connection ended
    │   └── FrameRejected        a frame that fails authentication, order or size
    ├── ComputeFailed            the compute thread ended or is stuck: the process ends, and another takes its sessions
    ├── InvalidMessage           a peer's message that does not validate
    ├── RecordError              an announcement that does not hold
    │   ├── RecordExpired        one that lived, or will live
    │   └── ClockSkew            clocks more than 30 s apart
    ├── RouteError
    │   └── NoRoute              blocks that no server has
    └── SessionError
        ├── RollbackImpossible   a cache cannot return to an earlier length; servers refuse the step with its text
        ├── StepTimeout          no answer within the step's deadline
        ├── HopFailed            a hop of the route ended or broke
        ├── Refused              a hop declines: no room, draining, not yours
        ├── EdgeDown             two hops cannot reach each other (repaired; never raised to callers)
        └── SessionClosed        the session has ended

Errors carry facts as attributes and callers branch on the class; the text says how to go on. All are raised to callers,
unless their line says otherwise; what never leaves its package stands there. One more thing is raised and is no error:
`swarm.model.span.SpanDone` ends a parent's call behind the last hosted block, and never leaves the span.
"""

from dataclasses import dataclass
from typing import ClassVar

from swarm.runs import runs_text


class SwarmError(Exception):
    """Base of every error below. says: the text, with the names of facts in it."""

    says: ClassVar[str] = ""

    def __str__(self) -> str:
        return self.says.format_map(vars(self)) if self.says else super().__str__()


class UsageError(SwarmError):
    """A wish of the caller that cannot be; a command prints the text as one line and exits with 2."""


@dataclass(eq=False)
class BadBlocks(UsageError):
    """A block range that is malformed, reversed, empty or out of the model's range."""

    text: str
    why: str
    n_blocks: int | None = None

    def __str__(self) -> str:
        hint = f"; the model has blocks 0:{self.n_blocks}" if self.n_blocks is not None else "; write it as 20:40"
        return f"bad block range {self.text!r}: {self.why}{hint}"


@dataclass(eq=False)
class ModelNotFound(UsageError):
    """Neither a local directory with a config.json nor a repository on the hub."""

    says: ClassVar[str] = "no such model {model!r}: {why}"
    model: str
    why: str


@dataclass(eq=False)
class UnsupportedCheckpoint(UsageError):
    """A checkpoint without safetensors, or whose files do not fit together."""

    says: ClassVar[str] = "cannot use the checkpoint {model!r}: {why}"
    model: str
    why: str


@dataclass(eq=False)
class UnsupportedArchitecture(UsageError):
    """A model family that cannot be split into spans safely."""

    says: ClassVar[str] = "cannot split {model_type!r} models into spans: {why}"
    model_type: str
    why: str


@dataclass(eq=False)
class PromptTooLong(UsageError):
    """More positions than the model, or the session, allows."""

    says: ClassVar[str] = "{positions} positions are more than {limited_by} allows ({limit}); shorten the prompt"
    positions: int
    limit: int
    limited_by: str


@dataclass(eq=False)
class AddressInUse(UsageError):
    """A listening address that cannot be had."""

    says: ClassVar[str] = "cannot listen on {address}: {why}; choose another port, or port 0 for any"
    address: str
    why: str


@dataclass(eq=False)
class IdentityInUse(UsageError):
    """Another process serves under the same identity file."""

    says: ClassVar[str] = "another process uses the identity {path}; stop it, or pass --identity with another file"
    path: str


@dataclass(eq=False)
class BadRequest(UsageError):
    """A field of a request to the gateway that cannot be answered. code: of the dialect's error, where it has one."""

    says: ClassVar[str] = "{field}: {why}"
    field: str
    why: str
    code: str | None = None


@dataclass(eq=False)
class BadConfiguration(UsageError):
    """A setting, a configuration file or an environment variable that cannot be used."""

    says: ClassVar[str] = "bad configuration, {setting}: {why}"
    setting: str
    why: str


class CheckpointError(SwarmError):
    """The files of a checkpoint are damaged or others than expected, or cannot be had."""


@dataclass(eq=False)
class ChecksumMismatch(CheckpointError):
    """A file whose SHA-256 differs from the manifest's."""

    file: str
    expected: str
    actual: str
    remedy: str = "fetch the file again"

    def __str__(self) -> str:
        return (
            f"{self.file} is damaged or was changed: its SHA-256 is {self.actual[:16]}..., "
            f"and was {self.expected[:16]}...; {self.remedy}"
        )


@dataclass(eq=False)
class RootMismatch(CheckpointError):
    """This checkpoint's root, or the digest of its texts, is not the expected one."""

    model: str
    expected: str
    actual: str
    what: str = "root"

    def __str__(self) -> str:
        return (
            f"{self.model!r} here has {self.what} {self.actual}, and {self.expected} was asked for: the files differ; "
            "get the same revision"
        )


@dataclass(eq=False)
class DownloadFailed(CheckpointError):
    """A file could not be downloaded or written."""

    says: ClassVar[str] = "could not download {file}: {why}"
    file: str
    why: str


class NetworkError(SwarmError):
    """Something between two peers."""


@dataclass(eq=False)
class Unreachable(NetworkError):
    """No answer at the given addresses within the deadline."""

    target: str
    addresses: tuple[str, ...]
    after_s: float
    why: str = "no answer"

    def __str__(self) -> str:
        places = ", ".join(self.addresses) or "no address"
        return f"{self.target} cannot be reached at {places} within {self.after_s:.0f} s: {self.why}"


@dataclass(eq=False)
class AnchorBusy(Unreachable):
    """An anchor that has too much to do now to lead to a peer, which may well be there. retry_after_s: as it says."""

    retry_after_s: float = 0.0


@dataclass(eq=False)
class HandshakeFailed(NetworkError):
    """The other side did not prove to be the peer that was asked for, or does not speak our handshake."""

    says: ClassVar[str] = "handshake with {peer} failed: {why}"
    peer: str
    why: str


@dataclass(eq=False)
class ProtocolMismatch(NetworkError):
    """Two major versions of the protocol."""

    peer: str
    theirs: int
    ours: int

    def __str__(self) -> str:
        older = "this side" if self.theirs > self.ours else "the other side"
        return f"{self.peer} speaks protocol {self.theirs}, this side speaks {self.ours}: {older} must upgrade"


@dataclass(eq=False)
class P2PFailed(NetworkError):
    """The libp2p daemon does not start, or keeps failing."""

    says: ClassVar[str] = "libp2p does not work here: {why}"
    why: str


class TooBusy(NetworkError):
    """A request beyond the limits of this node; the text goes back to the peer."""


@dataclass(eq=False)
class ChannelClosed(NetworkError):
    """The connection to a peer ended."""

    says: ClassVar[str] = "the connection to {peer} ended: {why}"
    peer: str
    why: str


@dataclass(eq=False)
class FrameRejected(NetworkError):
    """A frame that fails authentication, is out of order, or breaks a limit. The channel ends with it."""

    says: ClassVar[str] = "a frame from {peer} was rejected: {why}"
    peer: str
    why: str


class ComputeFailed(SwarmError):
    """The compute thread has ended, or is stuck in one batch: nothing more will be computed here."""


@dataclass(eq=False)
class InvalidMessage(SwarmError):
    """A peer's message that does not validate."""

    says: ClassVar[str] = "invalid {kind}: {why}"
    kind: str
    why: str


@dataclass(eq=False)
class RecordError(SwarmError):
    """An announcement that is malformed, forged, expired, misplaced or too large."""

    why: str

    def __str__(self) -> str:
        return f"announcement rejected: {self.why}"


class RecordExpired(RecordError):
    """An announcement whose time is over, or has not come by this clock."""


@dataclass(eq=False)
class ClockSkew(RecordError):
    """This machine's clock and the swarm's differ by more than is allowed."""

    why: str = "clock skew"
    skew_s: float = 0.0
    allowed_s: float = 30.0

    def __str__(self) -> str:
        direction = "ahead of" if self.skew_s > 0 else "behind"
        return (
            f"this machine's clock is {abs(self.skew_s):.0f} s {direction} the swarm's "
            f"({self.allowed_s:.0f} s are allowed): synchronise it, for example with chrony or systemd-timesyncd"
        )


class RouteError(SwarmError):
    """No usable way through the blocks."""


@dataclass(eq=False)
class NoRoute(RouteError):
    """Blocks that no usable server has. passing: hidden servers have them, and lack an anchor for the moment."""

    model: str
    missing: tuple[int, ...]
    why: str = "no server has them; host them with swarm-serve, or try again later"
    passing: bool = False

    def __str__(self) -> str:
        return f"no route through {self.model!r}: blocks {runs_text(self.missing)}: {self.why}"


class SessionError(SwarmError):
    """A running session cannot go on."""


class RollbackImpossible(SessionError):
    """A cache cannot return to an earlier length: the past is gone, or was never kept."""


@dataclass(eq=False)
class StepTimeout(SessionError):
    """No answer to a step within its deadline."""

    peer: str
    span: str
    after_s: float

    def __str__(self) -> str:
        waits = f"no answer to a step within {self.after_s:.1f} s, it waits for {self.peer} (blocks {self.span}): "
        return waits + "begin anew, and allow steps more time (step_timeout_s) if it is only slow"


@dataclass(eq=False)
class HopFailed(SessionError):
    """A hop of the route ended or broke."""

    says: ClassVar[str] = "hop {peer} (blocks {span}) failed: {why}"
    peer: str
    span: str
    why: str


@dataclass(eq=False)
class Refused(SessionError):
    """A hop declines a request; not a failure of the hop."""

    peer: str
    span: str
    code: str
    why: str
    retry_after_s: float | None = None

    def __str__(self) -> str:
        again = f"; try again in {self.retry_after_s:.1f} s" if self.retry_after_s is not None else ""
        return f"{self.peer} (blocks {self.span}) refuses, {self.code}: {self.why}{again}"


@dataclass(eq=False)
class EdgeDown(SessionError):
    """Two hops cannot reach each other, which is the fault of neither.

    edge: their processes, in the order in which activations flow. blocked: connecting again would be of no use.
    """

    edge: tuple[str, str]
    why: str
    blocked: bool

    def __str__(self) -> str:
        return self.why


@dataclass(eq=False)
class SessionClosed(SessionError):
    """The session has ended and takes no more steps."""

    says: ClassVar[str] = "the session has ended: {why}; {remedy}"
    why: str
    remedy: str = "open a new one"
