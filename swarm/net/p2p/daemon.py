"""One p2pd process under our control.

hivemind's own `P2P.create` hides that p2pd died and leaves it behind when the parent is killed, so the process is
started here and hivemind only attaches to it (`P2P.replicate`).
"""

import asyncio
import contextlib
import importlib.resources
import ipaddress
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import (
    P2PDaemonError,
    raise_if_failed,
    read_pbmsg_safe,
    write_pbmsg,
)
from hivemind.proto import p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from swarm.config import load_settings
from swarm.errors import AddressInUse, P2PFailed, Unreachable
from swarm.net.launch import command
from swarm.net.limits import DaemonLimits
from swarm.net.p2p.circuits import end_circuits
from swarm.net.p2p.multiaddr import host_of, split_multiaddr, text_of, where_to_listen
from swarm.net.ports import Port, kept_for_p2pd
from swarm.net.program import check_program

_FOLDER = "swarm-p2p-"

_log = structlog.get_logger("swarm.p2p")


@dataclass(frozen=True, slots=True)
class P2PConfig:
    """How p2pd runs.

    identity: libp2p key file, or None for a throw-away key. listen: host, and port or several to choose from; None for
    a client.
    """

    identity: Path | None
    listen: tuple[str, Port] | None
    announce: tuple[str, ...] = ()  # multiaddrs that others see instead of the listening ones
    program: Path | None = None  # None: hivemind's
    limits: DaemonLimits = field(default_factory=DaemonLimits)


class Daemon:
    """One running p2pd and hivemind's connection to it. Made by `running_daemon`."""

    def __init__(self, process: asyncio.subprocess.Process, p2p: P2P, output: deque[str], config: P2PConfig) -> None:
        self.p2p = p2p
        self.listen = config.listen
        self.port = config.listen[1] if config.listen is not None and isinstance(config.listen[1], int) else 0
        self._limits = config.limits
        self._process = process
        self._output = output
        self.given_up = ""  # why, if it shall be replaced

    @property
    def pid(self) -> int:
        """The process id of p2pd."""
        return self._process.pid

    @property
    def peer_id(self) -> str:
        """Our libp2p peer id."""
        return str(self.p2p.peer_id.to_base58())

    async def addresses(self) -> tuple[str, ...]:
        """Return the multiaddrs under which others can dial us; none for a client. Raises Unreachable."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY)
        response, _, writer = await self._ask(request, "p2pd", self._limits.probe_s)
        writer.close()
        return tuple(f"{Multiaddr(address)}/p2p/{self.peer_id}" for address in response.identify.addrs)

    async def hosts(self) -> dict[str, str]:
        """Return the literal address of each connected peer, by its peer id. Raises Unreachable."""
        return {peer: host for peer, address in (await self.peers()).items() if (host := host_of(address))}

    async def peers(self) -> dict[str, str]:
        """Return the multiaddr of each connected peer, by its peer id, without that id. Raises Unreachable."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS)
        response, _, writer = await self._ask(request, "p2pd", self._limits.probe_s)
        writer.close()
        return {
            str(PeerID(peer.id).to_base58()): text
            for peer in response.peers
            for address in peer.addrs
            if (text := text_of(address))
        }

    async def connected(self) -> frozenset[bytes]:
        """Return the ids of the connected peers. Raises Unreachable."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS)
        response, _, writer = await self._ask(request, "p2pd", self._limits.probe_s)
        writer.close()
        return frozenset(bytes(peer.id) for peer in response.peers)

    async def addresses_of(self, peer: bytes) -> tuple[bytes, ...]:
        """Return the multiaddrs, in bytes, that a connected peer has told, or our own; none of one that is unknown."""
        if peer == self.p2p.peer_id.to_bytes():
            request = p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY)
        else:
            within_ns = int(self._limits.find_s * 1e9)
            finding = p2pd_pb2.DHTRequest(type=p2pd_pb2.DHTRequest.FIND_PEER, peer=peer, timeout=within_ns)
            request = p2pd_pb2.Request(type=p2pd_pb2.Request.DHT, dht=finding)
        try:
            response, _, writer = await self._ask(request, "p2pd", self._limits.find_s)
        except Unreachable:
            return ()
        writer.close()
        return tuple(response.identify.addrs or response.dht.peer.addrs)

    async def connect(self, multiaddr: str, timeout_s: float) -> None:
        """Open a connection to a peer at one address. Raises Unreachable."""
        peer, address = split_multiaddr(multiaddr)
        await self.connect_at(peer.to_bytes(), [address.to_bytes()], timeout_s)

    async def connect_at(self, peer: bytes, addresses: Sequence[bytes], timeout_s: float) -> None:
        """Open a connection to a peer at one of several addresses, in bytes. Raises Unreachable."""
        connect = p2pd_pb2.ConnectRequest(peer=peer, addrs=addresses)
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connect)
        _, _, writer = await self._ask(request, str(PeerID(peer).to_base58()), timeout_s)
        writer.close()

    async def open_stream(
        self, peer: bytes, name: str, timeout_s: float
    ) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a raw stream to a peer that is connected or can be found, by its id. Raises Unreachable.

        Returns the multiaddr at which it is, in bytes, and the stream.
        """
        opening = p2pd_pb2.StreamOpenRequest(peer=peer, proto=[name])
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opening)
        response, reader, writer = await self._ask(request, str(PeerID(peer).to_base58()), timeout_s)
        return bytes(response.streamInfo.addr), reader, writer

    async def _ask(
        self,
        request: Any,  # noqa: ANN401 - a protobuf message
        whom: str,
        timeout_s: float,
    ) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
        """Make one control call on a connection of its own, which is closed unless it succeeds (hivemind leaks it)."""
        writer = None
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await self.p2p._client.control.daemon_connector.open_connection()
                await write_pbmsg(writer, request)
                response = p2pd_pb2.Response()
                await read_pbmsg_safe(reader, response)
            raise_if_failed(response)
        except BaseException as error:
            if writer is not None:
                writer.close()
            if isinstance(error, TimeoutError):
                raise Unreachable("a peer", (whom,), timeout_s) from None
            if isinstance(error, (P2PDaemonError, OSError, asyncio.IncompleteReadError)):
                raise Unreachable("a peer", (whom,), timeout_s, " ".join(str(error).split())[:200]) from None
            raise
        return response, reader, writer

    @property
    def is_broken(self) -> bool:
        """Whether it is known already that this p2pd cannot be used any more."""
        return self._broken() is not None

    def give_up(self, why: str) -> None:
        """Have this p2pd replaced: its connections lead nowhere, which it would find out much later."""
        self.given_up = why

    async def failed(self) -> str:
        """Wait until p2pd cannot be used any more and return why."""
        loop = asyncio.get_running_loop()
        next_probe = loop.time() + self._limits.probe_s
        while True:
            if (why := self._broken()) is not None:
                return why
            if loop.time() >= next_probe:
                try:
                    await self.addresses()
                except Unreachable as error:
                    return self._broken() or f"it does not answer: {error.why}"
                next_probe = loop.time() + self._limits.probe_s
            await asyncio.sleep(self._limits.poll_s)

    def _broken(self) -> str | None:
        if self.given_up:
            return self.given_up
        if (code := self._process.returncode) is not None:
            return f"it ended with code {code}: {' | '.join(self._output)[-300:]}"
        control = self.p2p._client.control
        # A late answer to a cancelled call ends hivemind's reader with an InvalidStateError, and the node is deaf.
        if control._read_task.done() or control._write_task.done():
            return "hivemind's connection to it ended"
        return None


class _PrivateP2P(P2P):  # type: ignore[misc]
    """hivemind's P2P without its `__del__`: its owner stops it."""

    def __del__(self) -> None:
        pass


@asynccontextmanager
async def running_daemon(config: P2PConfig) -> AsyncIterator[Daemon]:
    """Run p2pd. Raises AddressInUse, or P2PFailed when it is not the p2pd that we know or does not start."""
    use_hivemind_log_handler("nowhere")
    _remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))  # mode 0700: the sockets are for this user alone
    starting = ExitStack()
    try:
        if config.listen is not None:
            host, port = config.listen
            config = replace(config, listen=(host, starting.enter_context(kept_for_p2pd(host, port))))
        async with _process(config, folder) as (process, output):
            await _until_it_listens(process, config, output)
            starting.close()
            p2p = await _attach(folder, config.limits.start_timeout_s)
            try:
                await end_circuits(p2p, config.limits.start_timeout_s)
                yield Daemon(process, p2p, output, config)
            finally:
                await _detach(p2p)
    finally:
        starting.close()
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def _process(config: P2PConfig, folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, deque[str]]]:
    program, limits = config.program or p2pd(), config.limits
    await asyncio.to_thread(check_program, program, load_settings().p2pd_sha256)
    line = command(
        str(program),
        *_arguments(config, folder),
        descriptors_max=limits.descriptors_max,
        data_bytes_max=limits.data_bytes_max,
    )
    go_memory = "192MiB"  # from here on Go's collector works harder
    environment = {"GOLOG_LOG_LEVEL": "error", "GOMEMLIMIT": go_memory, "HOME": str(folder)} | {
        name: value for name in ("PATH", "TMPDIR", "LANG") if (value := os.environ.get(name)) is not None
    }
    process = await asyncio.create_subprocess_exec(
        *line,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # Ctrl-C in a terminal reaches the command alone, which then stops p2pd in order
    )
    output: deque[str] = deque(maxlen=20)  # lines
    reader = asyncio.create_task(_read_output(process, output))
    try:
        yield process, output
    finally:
        _signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(config.limits.stop_timeout_s):
                await process.wait()
        except TimeoutError:
            _signal(process, signal.SIGKILL)
            await process.wait()
        finally:
            _signal(process, signal.SIGKILL)  # if cancelled while waiting: nothing may stay behind
            try:
                await asyncio.wait({reader}, timeout=config.limits.stop_timeout_s)  # the pipe's end closes it
            finally:
                reader.cancel()
                await asyncio.wait({reader})


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    """Signal p2pd if it lives. Not through `process`, whose send_signal() reaps what asyncio's watcher waits for."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


async def _read_output(process: asyncio.subprocess.Process, output: deque[str]) -> None:
    """Keep the pipe empty, or p2pd would block on it; keep the last lines for error messages."""
    assert process.stdout is not None
    while chunk := await process.stdout.read(4096):
        for line in chunk.decode(errors="replace").splitlines():
            output.append(line[:300])
            _log.debug("p2pd", line=line[:300])


async def _until_it_listens(process: asyncio.subprocess.Process, config: P2PConfig, output: deque[str]) -> None:
    """Wait for the line that p2pd prints when its control socket is served."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(config.limits.start_timeout_s):
            while process.returncode is None:
                if any(line.startswith("Peer ID:") for line in output):
                    return
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)  # its last words
    text = " | ".join(output)
    for sign in ("address already in use", "cannot assign requested address", "permission denied"):
        if sign in text and "listen" in text and config.listen is not None:
            raise AddressInUse(f"{config.listen[0]}:{config.listen[1]}", sign)
    raise P2PFailed(f"p2pd did not start: {text[-300:] or 'no output'}; clients can go without it: --directory light")


async def _attach(folder: Path, timeout_s: float) -> P2P:
    class _Here(_PrivateP2P):
        _UNIX_SOCKET_PREFIX = f"/unix{folder}/"

    try:
        async with asyncio.timeout(timeout_s):
            return await _Here.replicate(Multiaddr(f"/unix{folder}/p2pd.sock"))
    except (TimeoutError, OSError, P2PDaemonError) as error:
        raise P2PFailed(f"p2pd does not answer: {error!r}") from None


async def _detach(p2p: P2P) -> None:
    """End hivemind's tasks and wait for them."""
    control = p2p._client.control
    tasks = {task for task in (p2p._listen_task, control._read_task, control._write_task) if task is not None}
    tasks |= set(control._handler_tasks.values())
    await p2p.shutdown()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for call in list(control._pending_calls.values()):
        if not call.done():
            call.set_exception(
                ConnectionError("p2pd has ended")
            )  # cancelled, it would end the caller's task in silence
            call.exception()  # looked at: the caller may be gone
    for task in tasks:
        if not task.cancelled():
            task.exception()  # looked at, so that it is not reported as never retrieved


def _remove_leftovers() -> None:
    """Remove the folders of processes that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        pid = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and sys.platform == "linux":
            shutil.rmtree(folder, ignore_errors=True)


def p2pd() -> Path:
    """Return the p2pd that came with hivemind."""
    return Path(str(importlib.resources.files("hivemind.hivemind_cli") / "p2pd"))


def _arguments(config: P2PConfig, folder: Path) -> list[str]:
    loopback = config.listen is not None and _is_loopback(config.listen[0])
    arguments = {
        "listen": f"/unix{folder}/p2pd.sock",
        "relay": 1,
        "relayService": 0,
        "autonat": 0,  # dialling on strangers' orders is our own, bounded service
        "natPortMap": int(config.listen is not None and not loopback),
        "connManager": 1,
        "connLo": config.limits.connections_low,
        "connHi": config.limits.connections_high,
        "idleTimeout": "30s",
        "persistentConnMaxMsgSize": 4 << 20,
        "dhtClient": 1,  # as a server it would keep strangers' records: swarm.dht.whereabouts answers instead
    }
    if config.identity is not None:
        arguments["id"] = str(config.identity)
    if config.listen is None:
        arguments["noListenAddrs"] = 1
    else:
        host, port = config.listen
        assert isinstance(port, int)  # it has been chosen
        arguments["hostAddrs"] = ",".join(where_to_listen(host, port))
    if config.announce:
        arguments["announceAddrs"] = ",".join(config.announce)
    return [f"-{name}={value}" for name, value in arguments.items()]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
