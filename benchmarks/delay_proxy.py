"""A TCP proxy that makes every byte late, in both directions: a wide-area network on one machine.

    python benchmarks/delay_proxy.py --delay-ms 25 --report late.json 127.0.0.1:7001=127.0.0.1:8001 ...

It serves any number of LISTEN=TARGET pairs until SIGTERM, and then writes how late it was itself, beyond the delay.
There is no limit of bandwidth. It waits with select(), which counts in microseconds: uvloop and epoll count in
milliseconds, and three or four of those would be seen in every token.
"""

import argparse
import asyncio
import json
import selectors
import signal
import statistics
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from swarm.net.launch import command

SAMPLES_MAX = 100_000


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("pairs", nargs="+", metavar="LISTEN=TARGET")
    arguments.add_argument("--delay-ms", type=float, default=25.0, help="one way")
    arguments.add_argument("--report", type=Path, required=True)
    options = arguments.parse_args()
    lateness_ms: deque[float] = deque(maxlen=SAMPLES_MAX)
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    stopped = loop.create_future()
    loop.add_signal_handler(signal.SIGTERM, stopped.set_result, None)
    try:
        for pair in options.pairs:
            listen, _, target = pair.partition("=")
            loop.run_until_complete(_serve(loop, listen, target, options.delay_ms / 1000, lateness_ms))
        print("ready", flush=True)
        loop.run_until_complete(stopped)
    finally:
        loop.close()
    options.report.write_text(json.dumps(list(lateness_ms)))


@contextmanager
def delay_proxies(pairs: Sequence[tuple[str, str]], delay_ms: float, report: Path) -> Iterator[None]:
    """Run proxies for (listen, target) pairs in a process of their own; `report` is there when the block has ended."""
    texts = [f"{listen}={target}" for listen, target in pairs]
    program = (sys.executable, __file__, "--delay-ms", str(delay_ms), "--report", str(report), *texts)
    line = command(*program, descriptors_max=1024, data_bytes_max=1 << 40)
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("the proxy did not start")
            yield
        finally:
            process.terminate()


def late_ms(report: Path) -> tuple[float, float]:
    """Return how late proxies were beyond their delay: median and 95th percentile."""
    samples = sorted(json.loads(report.read_text()))
    return statistics.median(samples), samples[int(0.95 * len(samples))]


async def _serve(
    loop: asyncio.AbstractEventLoop, listen: str, target: str, delay_s: float, lateness_ms: deque[float]
) -> None:
    host, _, port = listen.rpartition(":")

    def accept() -> _End:
        near = _End(loop, delay_s, lateness_ms)
        near.connect(target)
        return near

    await loop.create_server(accept, host, int(port))


class _End(asyncio.Protocol):
    """One side of a proxied connection. What it receives is written to the other side, `delay_s` later."""

    def __init__(self, loop: asyncio.AbstractEventLoop, delay_s: float, lateness_ms: deque[float]) -> None:
        self._loop = loop
        self._delay_s = delay_s
        self._lateness_ms = lateness_ms
        self._queue: deque[tuple[float, bytes | None]] = deque()  # due, data; None for the end
        self._transport: asyncio.Transport | None = None
        self.other: _End | None = None
        self._dial: asyncio.Task[None] | None = None

    def connect(self, target: str) -> None:
        """Open the other side."""
        self._dial = self._loop.create_task(self._connect(target))

    async def _connect(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        far = _End(self._loop, self._delay_s, self._lateness_ms)
        far.other = self
        try:
            await self._loop.create_connection(lambda: far, host, int(port))
        except OSError:
            if self._transport is not None:
                self._transport.close()
            return
        self.other = far
        self._deliver()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._put(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._put(None)

    def _put(self, data: bytes | None) -> None:
        due = self._loop.time() + self._delay_s
        self._queue.append((due, data))
        if len(self._queue) == 1:
            self._loop.call_at(due, self._deliver)

    def _deliver(self) -> None:
        """Write what is due; come back for the rest."""
        other = self.other
        if other is None or other._transport is None:
            return  # called again when the other side is there
        while self._queue:
            due, data = self._queue[0]
            now = self._loop.time()
            if due > now:
                self._loop.call_at(due, self._deliver)
                return
            self._queue.popleft()
            if data is None:
                other._transport.close()
            else:
                other._transport.write(data)
                self._lateness_ms.append(1000 * (now - due))


if __name__ == "__main__":
    main()
