"""The options that commands share, and the types of their values."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from click.core import ParameterSource

from swarm.config import NETWORK_PATTERN, Way, is_root

LOG_LEVELS = ("debug", "info", "warning", "error")
DTYPES = ("auto", "float32", "bfloat16", "float16")

Command = TypeVar("Command", bound=Callable[..., Any])


class HostPort(click.ParamType[tuple[str, int]]):
    """HOST:PORT, as a tuple; [::1]:PORT for IPv6. Port 0 is any free one."""

    name = "host:port"

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's signature
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[str, int]:
        """Parse, or fail with the reason."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\s/]+):(\d{1,5})", str(value))
        if match is None or int(match[2]) > 65535:
            self.fail(f"{value!r} is not HOST:PORT; write it as 0.0.0.0:31337", param, ctx)
        return match[1].strip("[]"), int(match[2])


HOST_PORT = HostPort()


class Number(click.FloatRange):
    """A number within bounds. Infinity is refused, and what is no number, which no bound refuses."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401
        """Return it, or fail."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


def was_given(name: str) -> bool:
    """Whether an option of the running command was given, on the command line or in the environment."""
    source = click.get_current_context().get_parameter_source(name)
    return source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


class Size(click.ParamType[int]):
    """An amount of memory or disk, such as 20GB."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse to bytes, or fail with the reason."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", str(value).strip(), re.IGNORECASE)
        if match is None:
            self.fail(f"{value!r} is not a size; write it as 20GB", param, ctx)
        return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


SIZE = Size()


class NetworkName(click.ParamType[str]):
    """The name of a swarm, as records carry it."""

    name = "name"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the form."""
        if re.fullmatch(NETWORK_PATTERN, str(value)) is None:
            self.fail(f"{value!r} is not 1 to 32 small letters, digits and dashes", param, ctx)
        return str(value)


NETWORK = NetworkName()


class Root(click.ParamType[str]):
    """A checkpoint's root, or for a client its pin."""

    name = "hex"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the form."""
        if not is_root(str(value)):
            self.fail(f"{value!r} is not 64 hex digits, or twice as many with a plus between them", param, ctx)
        return str(value)


def split_peers(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Let one --initial-peers, or SWARM_INITIAL_PEERS, hold several addresses with commas or spaces between them."""
    return tuple(part for text in value for part in re.split(r"[,\s]+", text) if part)


def option_group(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds options in this order."""

    def add(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def peers_option(purpose: str) -> Callable[[Command], Command]:
    """Return the option of the peers to begin with. purpose: of the node."""
    return click.option(
        "--initial-peers",
        multiple=True,
        metavar="MULTIADDR",
        callback=split_peers,
        help=f"node to {purpose} through; may be repeated",
    )


access_options = option_group(  # of private swarms
    click.option(
        "--network-key",
        type=click.Path(path_type=Path),
        default=None,
        help="key file that all members of a private swarm share",
    ),
    click.option(
        "--allow-peers",
        type=click.Path(path_type=Path),
        default=None,
        help="file with the ids of all peers that may take part, one in a line",
    ),
)

directory_option = click.option(
    "--directory",
    type=click.Choice(get_args(Way)),
    default="auto",
    show_default=True,
    help="how to read the servers' records; light needs no p2pd; auto: p2pd where it is installed",
)


def _lan(text: str) -> Callable[[Command], Command]:
    return click.option("--lan/--no-lan", default=True, show_default=True, help=text)


lan_option = _lan("find others on this network, and be found there (mDNS), unless the swarm is public")
looking_option = _lan("without --initial-peers, look for a node on this network (mDNS)")
model_options = option_group(  # of a client's commands
    click.option("--revision", default=None, help="branch, tag or commit of a hub repository"),
    click.option("--token", default=None, envvar=("SWARM_TOKEN", "HF_TOKEN"), help="for private or gated repositories"),
    click.option("--cache-dir", type=click.Path(path_type=Path), default=None, help="where downloads are kept"),
    peers_option("join"),
    click.option("--network", type=NETWORK, default=None, help="swarms of different names do not mix"),
    access_options,
    looking_option,
    click.option(
        "--identity", type=click.Path(path_type=Path), default=None, help="key file, for servers with a list of peers"
    ),
    directory_option,
)

running_options = option_group(
    click.option(
        "--ready-file",
        type=click.Path(path_type=Path),
        default=None,
        help="JSON with addresses and pid, written when others can connect",
    ),
    click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True),
)

common_options = option_group(  # of long-running commands that serve the swarm
    peers_option("join"),
    click.option(
        "--identity",
        type=click.Path(path_type=Path),
        default=None,
        help="key file; made at first use; by default the first of this command's own that no other process holds",
    ),
    click.option(
        "--network", type=NETWORK, default="public", show_default=True, help="swarms of different names do not mix"
    ),
    access_options,
    lan_option,
    running_options,
)


@dataclass(frozen=True, slots=True)
class Reading:
    """The swarm that a web command reads. identity: None for a fresh one. lan: look on this network, without peers."""

    initial_peers: tuple[str, ...]
    network: str
    network_key: Path | None
    allow_peers: Path | None
    identity: Path | None
    lan: bool = True


def reading_options(purpose: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of a web command's swarm, which takes them as one `reading`. purpose: of the first node."""
    options = option_group(
        peers_option(purpose),
        click.option("--network", type=NETWORK, default="public", show_default=True, help="the swarm's name"),
        access_options,
        looking_option,
        click.option(
            "--identity",
            type=click.Path(path_type=Path),
            default=None,
            help="key file, for servers with a list of peers; by default a fresh identity",
        ),
    )

    def add(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def command(*arguments: Any, **given: Any) -> None:  # noqa: ANN401 - click passes them by name
            own = {field.name: given.pop(field.name) for field in fields(Reading)}
            function(*arguments, reading=Reading(**own), **given)

        return options(command)

    return add
