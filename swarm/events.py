"""What happens, as structured events: for people on a terminal, else as JSON lines. Never prompts, never tensors."""

import contextlib
import logging
import sys

import structlog


def configure_events(level: str) -> None:
    """Send events of this level ("debug", "info", "warning", "error") and above to stderr."""
    terminal = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([] if terminal else [structlog.processors.format_exc_info]),
            structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: _Lines(sys.stderr),  # as it is then: notebooks replace it
    )


class _Lines(structlog.PrintLogger):
    """Prints where that is possible: a full disk, or a reader that has gone, must not end a server."""

    def msg(self, message: str) -> None:
        """Print one event."""
        with contextlib.suppress(OSError):
            super().msg(message)

    log = debug = info = warning = error = critical = exception = msg
