"""Events go to stderr, wherever that is; and what a terminal is given is text."""

import contextlib
import io
import sys

import pytest
import structlog

from swarm import commands
from swarm.events import configure_events
from swarm.protocol.base import TEXT_MAX
from swarm.protocol.codec import decode, encode
from swarm.protocol.messages import Refused

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b1A\u202e all good\n2026-11-24 [info] forged"


class Terminal(io.StringIO):
    """What was printed on a terminal."""

    def isatty(self):
        return True


@contextlib.contextmanager
def a_terminal():
    """Send events to one, and what commands say."""
    before, terminal = structlog.get_config(), Terminal()
    with contextlib.redirect_stderr(terminal):
        configure_events("info")
        try:
            yield terminal
        finally:
            structlog.configure(**before)


def controls(printed):
    """Return what a terminal would obey, less the renderer's own colours."""
    for number in range(100):
        printed = printed.replace(f"\x1b[{number}m", "")
    return {character for character in printed if not character.isprintable() and character != "\n"}


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


@pytest.mark.parametrize("words", [HOSTILE, "".join(HOSTILE.split())])  # structlog quotes those with spaces
def test_what_a_peer_says_is_text_on_a_terminal(words):
    error = ValueError(words)
    with a_terminal() as terminal:
        structlog.get_logger("test").info("channel failed", why=words, exc_info=error)
    assert "good" in terminal.getvalue()
    assert controls(terminal.getvalue()) == set()
    assert "\n2026-11-24 [info] forged'" not in terminal.getvalue()


def test_the_line_that_a_command_ends_with_is_text(monkeypatch):
    monkeypatch.setattr(commands, "_leave", lambda code: None)  # there is no other way in: a command ends its process
    with a_terminal() as terminal:
        commands._end(f"no such model {HOSTILE}", 2)
    assert "all good" in terminal.getvalue()
    assert controls(terminal.getvalue()) == set()
    assert terminal.getvalue().count("\n") == 1


def test_a_reason_is_text_at_both_ends_and_nobody_fails_over_it():
    fields = {"session": "ab" * 16, "epoch": 0, "code": "busy"}
    sent = Refused(why=(HOSTILE + "\udcff").ljust(TEXT_MAX, "\0"), **fields)
    raw = Refused.model_construct(kind="refused", why=HOSTILE, **fields)
    for message in (sent, raw):
        got, _ = decode(memoryview(bytearray(b"".join(encode(message)))))
        assert "all good" in got.why
        assert got.why.isprintable()
        assert len(got.why) == len(message.why)


def test_a_traceback_on_a_terminal_shows_no_variables():
    prompt = "a secret".upper()
    try:
        int(prompt[:0])
    except ValueError as error:
        with a_terminal() as terminal:
            structlog.get_logger("test").error("step failed", exc_info=error)
    assert "ValueError" in terminal.getvalue()
    assert prompt not in terminal.getvalue()
