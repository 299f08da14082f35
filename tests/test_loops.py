"""The loop of commands and clients, with uvloop and without, and its signals."""

import asyncio
import os
import signal
import stat
import sys
from types import SimpleNamespace

import pytest

from swarm import permissions
from swarm.loops import handle_signal, new_event_loop


def test_loop_is_asyncios_where_uvloop_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = [new_event_loop()]
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loops.append(new_event_loop())
    for loop in loops:
        loop.close()
    assert [type(loop).__module__.partition(".")[0] for loop in loops] == ["uvloop", "asyncio"]


async def test_signal_reaches_a_loop_without_signal_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(*_: object) -> None:
        raise NotImplementedError

    loop = asyncio.get_running_loop()
    got: asyncio.Future[signal.Signals] = loop.create_future()
    before = signal.getsignal(signal.SIGTERM)
    bare = SimpleNamespace(add_signal_handler=not_there, call_soon_threadsafe=loop.call_soon_threadsafe)
    try:
        handle_signal(bare, signal.SIGTERM, got.set_result)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(got, 5) == signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)


def test_modes_are_not_judged_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    readable = stat.S_IFREG | 0o644
    assert permissions.is_open(readable)
    assert not permissions.is_open(readable, 0o022)
    monkeypatch.setattr(permissions, "os", SimpleNamespace(name="nt"))
    assert not permissions.is_open(readable)
