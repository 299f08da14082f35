"""A TCP proxy that makes every byte late, in both directions: a wide-area network on one machine.

    python -m swarm.demo.delay_proxy --delay-ms 25 --report late.json 127.0.0.1:7001=127.0.0.1:8001 ...

It serves any number of LISTEN=TARGET pairs until SIGTERM, and then writes how late it was itself, beyond the delay.
With --mbit-s, each direction of a connection carries no more. Without, there is no limit of bandwidth.

A cable does not have to wake up, so the proxy's own share is kept small: the delay counts from when the kernel got the
bytes, and the last half millisecond of it is waited for awake.
"""

import argparse
import json
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from swarm.limits import limit
from swarm.net.launch import command


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """How the proxy works."""

    samples_max: int = limit(100_000, "samples", "of its lateness; the latest count")
    awake_s: float = limit(0.0005, "s", "before bytes are due, it does not sleep any more")
    read_bytes: int = limit(1 << 16, "bytes", "that are taken at once")
    backlog_s: float = limit(0.001, "s", "until bytes are offered again to a receiver that takes none")
    buffer_s: float = limit(0.1, "s", "that bytes wait for a limited line; more stay with their sender")


def main() -> None:
    """Run the command."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("pairs", nargs="+", metavar="LISTEN=TARGET")
    arguments.add_argument("--delay-ms", type=float, default=25.0, help="one way")
    arguments.add_argument("--mbit-s", type=float, default=0.0, help="of each direction of a connection; 0: no limit")
    arguments.add_argument("--report", type=Path, required=True)
    options = arguments.parse_args()
    proxy = Proxy(options.delay_ms / 1000, mbit_s=options.mbit_s)
    signal.signal(signal.SIGTERM, lambda *_: proxy.stop())
    for pair in options.pairs:
        listen, _, target = pair.partition("=")
        proxy.listen(listen, target)
    print("ready", flush=True)
    proxy.run()
    options.report.write_text(json.dumps(list(proxy.late_ms)))


@contextmanager
def delay_proxies(
    pairs: Sequence[tuple[str, str]], delay_ms: float, report: Path, mbit_s: float = 0.0
) -> Iterator[None]:
    """Run proxies for (listen, target) pairs in a process of their own; `report` is there when the block has ended.

    mbit_s: megabits a second, of each direction of a connection; 0 for no limit.
    """
    texts = [f"{listen}={target}" for listen, target in pairs]
    module = (sys.executable, "-m", "swarm.demo.delay_proxy")
    line = command(
        *module,
        "--delay-ms",
        str(delay_ms),
        "--mbit-s",
        str(mbit_s),
        "--report",
        str(report),
        *texts,
        descriptors_max=1024,
        data_bytes_max=1 << 40,
    )
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own command
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("the proxy did not start")
            yield
        finally:
            process.terminate()


def late_ms(report: Path) -> tuple[float, float]:
    """Return how late proxies were beyond their delay: median and 95th percentile."""
    samples = sorted(json.loads(report.read_text(encoding="utf-8")))
    return statistics.median(samples), samples[int(0.95 * len(samples))]


@dataclass(eq=False, slots=True)
class Pipe:
    """One direction of a proxied connection. queue: what is on its way, each with when it is due; b"" is the end.

    free_at: when the line has carried all that was read; only a limited line takes time for it.
    """

    source: socket.socket
    target: socket.socket
    queue: deque[tuple[float, bytes]] = field(default_factory=deque)
    free_at: float = 0.0
    ended: bool = False  # nothing more comes from its source


class Proxy:
    """All connections, in one thread."""

    def __init__(self, delay_s: float, limits: ProxyLimits | None = None, *, mbit_s: float = 0.0) -> None:
        """delay_s: of every byte, one way. mbit_s: of each direction of a connection; 0 for no limit."""
        self._limits = limits or ProxyLimits()
        self.late_ms: deque[float] = deque(maxlen=self._limits.samples_max)
        self._delay_s = delay_s
        self._byte_s = 8e-6 / mbit_s if mbit_s else 0.0
        self._stamp = 35 if sys.platform == "linux" else None  # SO_TIMESTAMPNS: when the kernel got what is read
        self._timespec = struct.Struct("@ll")
        self._listeners: dict[socket.socket, tuple[str, int]] = {}
        self._pipes: dict[socket.socket, Pipe] = {}  # by source
        self._stopped = False

    def listen(self, address: str, target: str) -> None:
        """Listen at "host:port" for those who want to talk to the target."""
        host, _, port = address.rpartition(":")
        target_host, _, target_port = target.rpartition(":")
        self._listeners[socket.create_server((host, int(port)))] = target_host, int(target_port)

    def stop(self) -> None:
        """End `run`, soon."""
        self._stopped = True

    def run(self) -> None:
        """Carry bytes until stopped."""
        while not self._stopped:
            now = time.time()
            due = min((pipe.queue[0][0] for pipe in self._pipes.values() if pipe.queue), default=now + 1.0)
            reading = [*self._listeners, *(source for source, pipe in self._pipes.items() if self._reads(pipe, now))]
            readable, _, _ = select.select(reading, (), (), max(0.0, due - now - self._limits.awake_s))
            for each in readable:
                if each in self._listeners:
                    self._accept(each)
                else:
                    self._read(self._pipes[each])
            for pipe in list(self._pipes.values()):
                self._deliver(pipe)

    def _reads(self, pipe: Pipe, now: float) -> bool:
        return not pipe.ended and pipe.free_at <= now + self._limits.buffer_s

    def _accept(self, listener: socket.socket) -> None:
        near, _ = listener.accept()
        try:
            far = socket.create_connection(self._listeners[listener], timeout=5.0)
        except OSError:
            near.close()
            return
        for end in (near, far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._stamp is not None:
                end.setsockopt(socket.SOL_SOCKET, self._stamp, 1)
        self._pipes[near], self._pipes[far] = Pipe(near, far), Pipe(far, near)

    def _read(self, pipe: Pipe) -> None:
        arrived = time.time()
        try:
            data, notes, _, _ = pipe.source.recvmsg(self._limits.read_bytes, socket.CMSG_SPACE(self._timespec.size))
        except BlockingIOError:
            return
        except OSError:
            data, notes = b"", []
        for _, kind, note in notes:
            if kind == self._stamp and len(note) >= self._timespec.size:
                seconds, nanoseconds = self._timespec.unpack_from(note)
                arrived = seconds + nanoseconds / 1e9
        pipe.ended = not data
        pipe.free_at = max(arrived, pipe.free_at) + len(data) * self._byte_s
        pipe.queue.append((pipe.free_at + self._delay_s, data))

    def _deliver(self, pipe: Pipe) -> None:
        """Write what is due."""
        while pipe.queue and pipe.queue[0][0] <= (now := time.time()):
            due, data = pipe.queue.popleft()
            if not data:
                with suppress(OSError):
                    pipe.target.shutdown(socket.SHUT_WR)
                self._forget(pipe)
                return
            try:
                sent = pipe.target.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # nobody reads it any more
            if sent < len(data):
                pipe.queue.appendleft((now + self._limits.backlog_s, data[sent:]))
            if sent:
                self.late_ms.append(1000 * (now - due))

    def _forget(self, pipe: Pipe) -> None:
        """Close a connection whose both directions have ended."""
        other = self._pipes.get(pipe.target)
        if other is None or (other.ended and not other.queue):
            for end in (pipe.source, pipe.target):
                self._pipes.pop(end, None)
                end.close()


if __name__ == "__main__":
    main()
