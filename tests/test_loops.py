"""The loop of commands and clients, with uvloop and without, and its signals."""

import asyncio
import gc
import os
import signal
import stat
import sys
import threading
from types import SimpleNamespace

import pytest

from swarm import loops, permissions
from swarm.loops import Doorbell, handle_signal, new_event_loop


def test_loop_is_asyncios_where_uvloop_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [new_event_loop()]
    monkeypatch.setitem(sys.modules, "uvloop", None)
    made.append(new_event_loop())
    for loop in made:
        loop.close()
    assert [type(loop).__module__.partition(".")[0] for loop in made] == ["uvloop", "asyncio"]


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


@pytest.mark.parametrize("platform", ["linux", "darwin"])
async def test_a_bell_hands_over_all_calls_in_order(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(loops.sys, "platform", platform)
    loop = asyncio.get_running_loop()
    bell, got, rung = Doorbell(loop), list[tuple[int, int]](), loop.create_future()

    def ring(thread: int) -> None:
        for number in range(500):
            bell.ring(lambda number=number: got.append((thread, number)))

    threads = [threading.Thread(target=ring, args=(each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        await asyncio.sleep(0.001)
    bell.ring(lambda: rung.set_result(None))
    await asyncio.wait_for(rung, 10)
    assert [[number for of, number in got if of == each] for each in range(4)] == [list(range(500))] * 4
    bell.close()


async def test_a_call_that_fails_keeps_no_other_from_the_loop() -> None:
    loop = asyncio.get_running_loop()
    bell, errors, rung = Doorbell(loop), list[BaseException](), loop.create_future()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    bell.ring(lambda: 1 // 0)
    bell.ring(lambda: rung.set_result(None))
    await asyncio.wait_for(rung, 10)
    assert [type(error) for error in errors] == [ZeroDivisionError]
    bell.close()


def test_a_closed_bell_takes_no_calls_and_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    loop = asyncio.SelectorEventLoop()
    bell, left = Doorbell(loop), Doorbell(loop)
    bell.close()
    bell.close()
    with pytest.raises(RuntimeError):
        bell.ring(print)
    loop.close()
    with pytest.raises(RuntimeError):  # its loop is closed
        left.ring(print)
    del left, loop
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
