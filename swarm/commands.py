"""How all commands run: logging, the ready file, signals, and from an error to an exit code. See `swarm.options`, too.

    @click.command("swarm-bootstrap")
    @common_options
    def command(...): run_until_stopped(lambda stop: serve(..., stop), log_level)

    def main() -> None: run_click(command)

Exit codes: 0 after SIGTERM or SIGINT, 2 for an error that the caller can correct (UsageError), 1 for any other
SwarmError; in both cases with one line on stderr. A second signal ends the process at once, and p2pd with it.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import click
from pydantic import BaseModel, ConfigDict

from swarm.config import load_settings
from swarm.errors import BadConfiguration, SwarmError, UsageError
from swarm.events import configure_events, printable
from swarm.loops import handle_signal, new_event_loop


class Ready(BaseModel):
    """The contents of a ready file. Commands extend it."""

    model_config = ConfigDict(strict=True, frozen=True)

    peer_id: str
    addresses: tuple[str, ...]  # multiaddrs that others can use as --initial-peers
    pid: int


class Stop:
    """The wish to end, from a signal. A command that waits for it ends in order; one that does not is cancelled."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._awaited = False

    async def wait(self) -> None:
        """Wait for the first signal. From here on, the command ends by itself when it comes."""
        self._awaited = True
        await self._asked.wait()

    @property
    def asked(self) -> bool:
        """Whether the signal has come."""
        return self._asked.is_set()

    def ask(self, main: asyncio.Task[None]) -> None:
        """Ask the command to end: wake it if it waits, cancel it if it is still starting."""
        self._asked.set()
        if not self._awaited:
            main.cancel()


# --- running ---------------------------------------------------------------------------------------------------------


def run_click(command: click.Command) -> NoReturn:
    """Run a click command on sys.argv, with settings from files and environment as defaults, and exit."""
    try:
        settings = load_settings().model_dump(exclude_none=True, exclude={"gateway"})  # a table, of no option
        several = {option.name for option in command.params if isinstance(option, click.Option) and option.multiple}
        one = {name: (value,) for name, value in settings.items() if name in several and isinstance(value, str)}
        status = command.main(
            standalone_mode=False, auto_envvar_prefix="SWARM", default_map=settings | one, prog_name=command.name
        )
        _leave(status if isinstance(status, int) else 0)
    except click.exceptions.Abort:
        _leave(130)
    except click.ClickException as error:
        name = command.name
        _end(f"{error.format_message()} (see {name} --help)", 2)
    except UsageError as error:
        _end(str(error), 2)
    except SwarmError as error:
        _end(str(error), 1)


def run_until_stopped(main: Callable[[Stop], Awaitable[None]], log_level: str) -> None:
    """Run `main` in a loop of its own until it returns, fails or is stopped by a signal."""
    configure_logging(log_level)
    with contextlib.suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_supervised(main))


async def _supervised(main: Callable[[Stop], Awaitable[None]]) -> None:
    stop, loop = Stop(), asyncio.get_running_loop()

    async def run() -> None:
        await main(stop)

    task = asyncio.create_task(run())

    def on_signal(number: signal.Signals) -> None:
        if stop.asked:
            _drop_partial_downloads()
            os._exit(128 + number)
        stop.ask(task)

    for number in (signal.SIGTERM, signal.SIGINT):
        handle_signal(loop, number, on_signal)
    try:
        await task
    except asyncio.CancelledError:
        if not stop.asked:
            raise


@contextmanager
def ending_at_once(code: int = 0) -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process within the block, in which libraries are imported.

    Nothing needs to be cleaned up yet, and `transformers` would take a KeyboardInterrupt for a library that is missing.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: _leave(code or 128 + number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def importing(extra: str, part: str) -> Iterator[None]:
    """Import a part of the package within the block, as `ending_at_once`.

    extra: of the package, with the part's libraries. Raises a usage error where one of them is missing.
    """
    with ending_at_once():
        try:
            yield
        except ModuleNotFoundError as error:
            raise click.UsageError(
                f"{error.name} is missing: install the {part} with pip install 'swarm-inference[{extra}]'"
            ) from None


def _end(text: str, code: int) -> NoReturn:
    print("error: " + printable(" ".join(text.split())), file=sys.stderr)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Exit without tearing the interpreter down: context managers have cleaned up.

    A native thread that still runs, such as one that reads weights, would make the teardown abort; torch's own takes
    a second or more.
    """
    _drop_partial_downloads()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader may be gone
            stream.flush()
    os._exit(code)


def _drop_partial_downloads() -> None:
    """Delete the files that a thread still downloads: the process ends before the hub's library could do so."""
    if threading.active_count() == 1 or sys.platform == "win32":  # an open file cannot be deleted there
        return
    import psutil  # noqa: PLC0415 - most processes end without

    with contextlib.suppress(psutil.Error, OSError):
        for file in psutil.Process().open_files():
            if file.path.endswith(".incomplete"):
                Path(file.path).unlink(missing_ok=True)


def configure_logging(level: str) -> None:
    """Send our events and libraries' warnings to stderr."""
    configure_events(level)
    number = max(getattr(logging, level.upper()), logging.WARNING)
    logging.basicConfig(level=number, stream=sys.stderr, format="%(name)s: %(message)s")


# --- files -----------------------------------------------------------------------------------------------------------


@contextmanager
def ready_writer(path: Path | None) -> Iterator[Callable[[Ready], None]]:
    """Give a function that writes the ready file in one step; an old one is removed before, and ours after.

    Raises BadConfiguration.
    """

    def write(ready: Ready) -> None:
        if path is None:
            return
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            partial.write_text(json.dumps(ready.model_dump(mode="json")) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise BadConfiguration(f"ready file {path}", error.strerror or str(error)) from None

    remove_ready_file(path)
    if path is not None and not path.parent.is_dir():  # else it would be noticed when all the work is done
        raise BadConfiguration(f"ready file {path}", "there is no such directory")
    try:
        yield write
    finally:
        remove_ready_file(path)


def remove_ready_file(path: Path | None) -> None:
    """Remove a ready file that may exist. Raises BadConfiguration."""
    try:
        if path is not None:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise BadConfiguration(f"ready file {path}", error.strerror or str(error)) from None
