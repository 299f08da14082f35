"""What happens, as structured events: for people on a terminal, else as JSON lines. Never prompts, never tensors."""

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
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # as it is then: notebooks replace it
    )
