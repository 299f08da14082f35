"""What a command takes where nothing was named: ports and an identity that no other process has.

A second server on one machine then needs no option. Each choice is made by taking: a port by listening on it, an
identity by its lock. A command that starts again finds its own free, and takes them again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from swarm import config
from swarm.errors import BadConfiguration, IdentityInUse
from swarm.identity import Identity, IdentityLock
from swarm.limits import limit
from swarm.options import HOST_PORT, Command


@dataclass(frozen=True, slots=True)
class ChoiceLimits:
    """Of the ports and identities that a command chooses among."""

    tries_max: int = limit(32, "ports", "or identities; where other processes have all of them, the command ends")


def listen_option(name: str, default: str, purpose: str, step: int = 10) -> Callable[[Command], Command]:
    """Return an option of where to listen, which gives a host, and a port or several.

    Several where none was named, on the command line or in the environment: the first that is free is to be taken.
    step: between them, which leaves room for the other ports of one process.
    """

    def ports(ctx: click.Context, param: click.Parameter, value: tuple[str, int]) -> tuple[str, int | range]:
        host, port = value
        assert param.name is not None
        if ctx.get_parameter_source(param.name) is not ParameterSource.DEFAULT:
            return host, port
        return host, range(port, port + ChoiceLimits().tries_max * step, step)

    shown = f"{default}, or port +{step}, +{2 * step}, ... where that is taken"
    help_text = f"{purpose}; port 0 picks any free one"
    return click.option(name, type=HOST_PORT, default=default, show_default=shown, callback=ports, help=help_text)


@contextmanager
def hold_identity(named: Path | None, command: str) -> Iterator[tuple[Path, Identity]]:
    """Load an identity, or make one, and keep other processes off it.

    named: its file; None takes the first of the command's own that no other process holds. Raises BadConfiguration and
    IdentityInUse.
    """
    paths = [named] if named is not None else own_identities(command)
    for path in paths:
        identity = Identity.load_or_create(path)
        try:
            lock = IdentityLock(path)
        except OSError as error:
            raise BadConfiguration(f"identity {path}", error.strerror or str(error)) from None
        except IdentityInUse:
            continue
        with lock:
            yield path, identity
        return
    raise IdentityInUse(str(paths[0]))


def own_identities(command: str) -> list[Path]:
    """Return the key files of a command: of the first process, the second, ..."""
    names = [command, *(f"{command}-{n}" for n in range(2, ChoiceLimits().tries_max + 1))]
    return [config.DATA_DIR / f"{name}.identity" for name in names]
