"""Structured events: for people on a terminal, else as JSON lines. Never prompts, never tensors."""

import contextlib
import io
import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import EventDict, ExcInfo, WrappedLogger


def printable(text: str) -> str:
    """Return a stranger's text as a terminal may be given it: one line, as long as before."""
    if text.isprintable():
        return text
    # A replaced character would move a cursor, ring, or rename a terminal's window.
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)


def configure_events(level: str) -> None:
    """Send events of this level ("debug", "info", "warning", "error") and above to stderr."""
    terminal = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([_printable_values] if terminal else []),  # JSON escapes them
            structlog.processors.StackInfoRenderer(),
            *([] if terminal else [structlog.processors.format_exc_info]),
            structlog.dev.ConsoleRenderer(exception_formatter=_traceback)
            if terminal
            else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: _Lines(sys.stderr),  # as it is then: notebooks replace it
    )


def _printable_values(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    """Peers' words are in some events: see to it that they stay words."""
    del logger, name
    return {key: printable(value) if isinstance(value, str) else value for key, value in event.items()}


def _traceback(out: TextIO, exc_info: ExcInfo) -> None:
    """Print a traceback without variables: they are prompts and tensors."""
    plain = io.StringIO()
    structlog.dev.plain_traceback(plain, exc_info)
    out.write("\n".join(printable(line) for line in plain.getvalue().split("\n")))


class _Lines(structlog.PrintLogger):
    """Prints where that is possible: a full disk, or a reader that has gone, must not end a server."""

    def msg(self, message: str) -> None:
        """Print one event."""
        with contextlib.suppress(OSError):
            super().msg(message)

    log = debug = info = warning = error = critical = exception = msg
