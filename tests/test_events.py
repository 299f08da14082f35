"""Events go to stderr, wherever that is."""

import sys

import pytest
import structlog

from swarm.events import configure_events


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_a_full_disk_behind_stderr_ends_nothing(monkeypatch, level):
    before = structlog.get_config()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        try:
            configure_events("info")
            getattr(structlog.get_logger("test"), level)("session opened", session="a")
        finally:
            structlog.configure(**before)
            full.buffer.raw.close()  # what is still in the buffer has nowhere to go
