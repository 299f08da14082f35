"""Every error that the swarm raises on purpose.

    SwarmError
    ├── UsageError               what the caller asked for cannot be: commands exit 2
    │   ├── BadBlocks            a block range that is reversed, empty or out of range
    │   ├── ModelNotFound        no such directory or repository
    │   ├── UnsupportedCheckpoint   no safetensors, or files that do not fit together
    │   ├── UnsupportedArchitecture a family that cannot be split safely
    │   ├── PromptTooLong        more positions than the model or the session allows
    │   ├── AddressInUse         a port that somebody else listens on
    │   ├── IdentityInUse        another process holds the same identity file
    │   └── BadConfiguration     a setting, a file or an environment variable
    ├── CheckpointError
    │   ├── ChecksumMismatch     a file differs from its manifest
    │   ├── RootMismatch         this checkpoint is not the one that the swarm serves
    │   └── DownloadFailed       the hub, the connection or the disk
    ├── NetworkError
    │   ├── Unreachable          nobody answered at these addresses
    │   ├── HandshakeFailed      the other side did not prove who it is
    │   ├── ProtocolMismatch     two major versions of the protocol: says who must upgrade
    │   ├── P2PFailed            the libp2p daemon does not run
    │   ├── ChannelClosed        the connection ended
    │   └── FrameRejected        a frame that fails authentication, order or size
    ├── InvalidMessage           a peer's message that does not validate
    ├── RecordError              an announcement that does not hold
    │   ├── RecordExpired        one that lived, or will live
    │   └── ClockSkew            clocks more than 30 s apart
    ├── RouteError
    │   └── NoRoute              blocks that nobody serves
    └── SessionError
        ├── StepTimeout          no answer within the step's deadline
        ├── HopFailed            a hop of the route ended or broke
        ├── Refused              a hop declines: no room, draining, not yours
        ├── EdgeDown             two hops cannot reach each other (repaired; never raised to callers)
        └── SessionClosed        the session has ended

Errors carry facts as attributes and callers branch on the class; the text is for people, and says what to do next.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class SwarmError(Exception):
    """Base of every error below."""


class UsageError(SwarmError):
    """What the caller asked for cannot be; a command prints the text as one line and exits with 2."""


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

    model: str
    why: str

    def __str__(self) -> str:
        return f"no such model {self.model!r}: {self.why}"


@dataclass(eq=False)
class UnsupportedCheckpoint(UsageError):
    """A checkpoint without safetensors, or whose files do not fit together."""

    model: str
    why: str

    def __str__(self) -> str:
        return f"cannot use the checkpoint {self.model!r}: {self.why}"


@dataclass(eq=False)
class UnsupportedArchitecture(UsageError):
    """A model family that cannot be split into spans safely."""

    model_type: str
    why: str

    def __str__(self) -> str:
        return f"cannot split {self.model_type!r} models into spans: {self.why}"


@dataclass(eq=False)
class PromptTooLong(UsageError):
    """More positions than the model, or the session, allows."""

    positions: int
    limit: int
    limited_by: str

    def __str__(self) -> str:
        return f"{self.positions} positions are more than {self.limited_by} allows ({self.limit}); shorten the prompt"


@dataclass(eq=False)
class AddressInUse(UsageError):
    """A listening address that cannot be had."""

    address: str
    why: str

    def __str__(self) -> str:
        return f"cannot listen on {self.address}: {self.why}; choose another port, or port 0 for any"


@dataclass(eq=False)
class IdentityInUse(UsageError):
    """Another process serves under the same identity file."""

    path: str

    def __str__(self) -> str:
        return f"another process uses the identity {self.path}; stop it, or pass --identity with another file"


@dataclass(eq=False)
class BadConfiguration(UsageError):
    """A setting, a configuration file or an environment variable that cannot be used."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"bad configuration, {self.what}: {self.why}"


class CheckpointError(SwarmError):
    """The files of a checkpoint are not what they should be, or cannot be had."""


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
    """This checkpoint's root is not the expected one."""

    model: str
    expected: str
    actual: str

    def __str__(self) -> str:
        return (
            f"{self.model!r} here has root {self.actual}, the swarm serves root {self.expected}: the files differ; "
            "get the same revision, or pass --root with your own root to serve yours beside it"
        )


@dataclass(eq=False)
class DownloadFailed(CheckpointError):
    """A file could not be downloaded or written."""

    file: str
    why: str

    def __str__(self) -> str:
        return f"could not download {self.file}: {self.why}"


class NetworkError(SwarmError):
    """Something between two peers."""


@dataclass(eq=False)
class Unreachable(NetworkError):
    """Nobody answered at the given addresses within the deadline."""

    what: str
    addresses: tuple[str, ...]
    after_s: float
    why: str = "no answer"

    def __str__(self) -> str:
        places = ", ".join(self.addresses) or "no address"
        return f"{self.what} cannot be reached at {places} within {self.after_s:.0f} s: {self.why}"


@dataclass(eq=False)
class HandshakeFailed(NetworkError):
    """The other side did not prove to be the peer that was asked for, or does not speak our handshake."""

    peer: str
    why: str

    def __str__(self) -> str:
        return f"handshake with {self.peer} failed: {self.why}"


@dataclass(eq=False)
class ProtocolMismatch(NetworkError):
    """Two major versions of the protocol."""

    peer: str
    theirs: int
    ours: int

    def __str__(self) -> str:
        who = "this side" if self.theirs > self.ours else "the other side"
        return f"{self.peer} speaks protocol {self.theirs}, this side speaks {self.ours}: {who} must upgrade"


@dataclass(eq=False)
class P2PFailed(NetworkError):
    """The libp2p daemon does not start, or keeps failing."""

    why: str

    def __str__(self) -> str:
        return f"libp2p does not work here: {self.why}"


@dataclass(eq=False)
class ChannelClosed(NetworkError):
    """The connection to a peer ended."""

    peer: str
    why: str

    def __str__(self) -> str:
        return f"the connection to {self.peer} ended: {self.why}"


@dataclass(eq=False)
class FrameRejected(NetworkError):
    """A frame that fails authentication, is out of order, or breaks a limit. The channel ends with it."""

    peer: str
    why: str

    def __str__(self) -> str:
        return f"a frame from {self.peer} was rejected: {self.why}"


@dataclass(eq=False)
class InvalidMessage(SwarmError):
    """A peer's message that does not validate."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"invalid {self.what}: {self.why}"


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
    """Blocks that nobody serves, or nobody who may be used."""

    model: str
    missing: tuple[int, ...]
    why: str = "nobody serves them"

    def __str__(self) -> str:
        return f"no route through {self.model!r}: blocks {runs_text(self.missing)}: {self.why}"


class SessionError(SwarmError):
    """A running session cannot go on."""


@dataclass(eq=False)
class StepTimeout(SessionError):
    """No answer to a step within its deadline."""

    peer: str
    span: str
    after_s: float

    def __str__(self) -> str:
        return (
            f"no answer to a step within {self.after_s:.1f} s, it waits for {self.peer} (blocks {self.span}): "
            "begin anew, and allow steps more time (step_timeout_s) if it is but slow"
        )


@dataclass(eq=False)
class HopFailed(SessionError):
    """A hop of the route ended or broke."""

    peer: str
    span: str
    why: str

    def __str__(self) -> str:
        return f"hop {self.peer} (blocks {self.span}) failed: {self.why}"


@dataclass(eq=False)
class Refused(SessionError):
    """A hop declines what was asked; not a failure of the hop."""

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

    why: str
    remedy: str = "open a new one"

    def __str__(self) -> str:
        return f"the session has ended: {self.why}; {self.remedy}"


@contextmanager
def ungrouped() -> Iterator[None]:
    """Raise what a TaskGroup within the block raises: the error itself where it is but one."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise _only(group) from None


def _only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    if len(group.exceptions) > 1:
        return group
    inner = group.exceptions[0]
    return _only(inner) if isinstance(inner, BaseExceptionGroup) else inner


def runs_text(numbers: tuple[int, ...]) -> str:
    """Write sorted block numbers as ranges: (3, 4, 5, 9) -> "3:6, 9:10"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n:
            runs[-1][1] = n + 1
        else:
            runs.append([n, n + 1])
    return ", ".join(f"{a}:{b}" for a, b in runs)
