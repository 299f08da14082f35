"""Replaces p2pd when it fails, and all that was built on it."""

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import structlog

from swarm.errors import P2PFailed
from swarm.net.p2p.daemon import Daemon, P2PConfig, running_daemon

_log = structlog.get_logger("swarm.p2p")


async def supervise(config: P2PConfig, attach: Callable[[Daemon], AbstractAsyncContextManager[Any]]) -> None:
    """Keep a p2pd running, and all that `attach` builds on it, until cancelled.

    A failure while the first one starts is raised as it is (AddressInUse, Unreachable, ...). A later one is followed by
    a restart on the same port. Raises P2PFailed after `restarts_max` failures in a row.
    """
    loop, limits = asyncio.get_running_loop(), config.limits
    failures, attached = 0, asyncio.Event()
    while True:
        began = loop.time()
        try:
            async with running_daemon(config) as daemon:
                config = replace(config, listen=daemon.listen)  # others know us by this port now
                why = await _used_until_it_fails(daemon, attach, attached)
                began = -math.inf if daemon.given_up else began  # that is no failure of its own
        except Exception as error:
            if not attached.is_set():
                raise
            why = str(error) or repr(error)
        if loop.time() - began > limits.restart_forget_s:
            failures = 0
        failures += 1
        if failures > limits.restarts_max:
            raise P2PFailed(f"p2pd failed {failures} times in a row, last: {why}")
        delay_s = limits.backoff_s[min(failures, len(limits.backoff_s)) - 1]
        _log.warning("p2pd is replaced", why=why, failures=failures, delay_s=delay_s)
        await asyncio.sleep(delay_s)


async def _used_until_it_fails(
    daemon: Daemon, attach: Callable[[Daemon], AbstractAsyncContextManager[Any]], attached: asyncio.Event
) -> str:
    """Attach and wait for p2pd's failure, which may come before attaching is done: hivemind then waits for ever."""

    async def use() -> None:
        async with attach(daemon):
            attached.set()
            await asyncio.get_running_loop().create_future()  # until cancelled

    using, failing = asyncio.create_task(use()), asyncio.create_task(daemon.failed())
    try:
        await asyncio.wait({using, failing}, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            if not attached.is_set():
                raise P2PFailed(failing.result())
            return failing.result()
        using.result()  # raises: it does not end by itself
        raise AssertionError("attached for ever")
    finally:
        for task in (using, failing):
            task.cancel()
        await asyncio.wait({using, failing})
