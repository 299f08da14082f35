"""The client's loop: whoever waits for work in it learns of its end, whenever that comes."""

import asyncio
import gc
import os
import signal
import threading
import time
from concurrent.futures import CancelledError
from contextlib import suppress

import pytest

from swarm.client.hf.runtime import LoopThread
from swarm.errors import SessionClosed


def outcome_of(work):
    """A thread that runs `work`, and what came of it."""
    outcome = []

    def attempt():
        with pytest.raises((CancelledError, SessionClosed)) as raised:
            work()
        outcome.append(raised.type)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    return thread, outcome


def test_work_that_comes_while_the_loop_ends_is_refused():
    loop = LoopThread()
    began, ending = threading.Event(), threading.Event()

    async def ends_slowly():
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ending.set()
            await asyncio.sleep(0.3)

    def late():
        ending.wait(10)
        loop.run(asyncio.sleep(3600))

    first, _ = outcome_of(lambda: loop.run(ends_slowly()))
    second, outcome = outcome_of(late)
    assert began.wait(10)
    loop.stop()
    for thread in (first, second):
        thread.join(5)
    assert outcome == [SessionClosed]


def test_a_task_begun_during_cancellation_ends_with_the_loop():
    loop = LoopThread()
    ended = threading.Event()

    async def cleaning():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    async def leaves_some(began):
        try:
            began.set()
            await asyncio.sleep(3600)
        finally:
            loop.cleaning = asyncio.create_task(cleaning())
            await asyncio.sleep(0)

    began = threading.Event()
    loop.start(leaves_some(began))
    assert began.wait(10)
    loop.stop()
    assert ended.wait(5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_is_told_so_and_leaves_its_parent_alone():
    async def answer():
        return 42

    def in_child(loop):
        assert not loop.alive
        loop.start(answer())
        loop.stop()
        for hand in (lambda: loop.run(answer()), lambda: loop.begin(asyncio.Future)):
            with pytest.raises(SessionClosed, match="forked"):
                hand()

    loop = LoopThread()
    child = os.fork()
    if not child:
        signal.alarm(20)
        failed = True
        with suppress(BaseException):
            in_child(loop)
            failed = False
        os._exit(failed)
    assert os.waitpid(child, 0)[1] == 0
    assert loop.run(answer()) == 42
    loop.stop()


def test_work_whose_failure_nothing_waits_for_says_nothing(caplog):
    loop = LoopThread()

    def refuse():
        raise SessionClosed("it was closed")

    begun = loop.begin(refuse)
    while not begun.is_done:
        time.sleep(0.001)
    del begun
    gc.collect()
    loop.stop()
    assert not caplog.records
