"""py-libp2p in a thread of its own: connects to peers and makes unary calls for an asyncio loop.

py-libp2p runs on trio; clients and web servers run on asyncio. Requests cross over by `TrioToken.run_sync_soon`,
answers by `call_soon_threadsafe`. A failure in py-libp2p ends this thread alone, and every waiting call then fails.
"""

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog
import trio
from libp2p import new_host
from libp2p.abc import INetConn
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.kad_dht.pb.kademlia_pb2 import Message as KadMessage
from libp2p.network import swarm as libp2p_swarm
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo, info_from_p2p_addr
from libp2p.peer.peerstore import PeerStoreError
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from multiaddr import Multiaddr

from swarm.dht.light.limits import HostLimits
from swarm.dht.messages import CallRequest, Frame, varint
from swarm.errors import BadConfiguration, Unreachable
from swarm.net.reach import is_told_well

Result = TypeVar("Result")
_log = structlog.get_logger("swarm.light")


@asynccontextmanager
async def open_host(*, public: bool = False) -> "AsyncIterator[LightHost]":
    """Run py-libp2p while the block runs. Raises Unreachable if it does not start. public: see `swarm.net.reach`."""
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)  # it warns of every node that is gone
    host = LightHost(public=public)
    try:
        await host.start()
        yield host
    finally:
        await host.stop()


class LightHost:
    """A libp2p host that dials and never listens. Its methods belong to the loop that started it."""

    def __init__(self, limits: HostLimits = HostLimits(), *, public: bool = False) -> None:  # noqa: B008 - frozen
        self._limits, self._public = limits, public
        self._loop = asyncio.get_running_loop()
        self._pending: set[asyncio.Future[Any]] = set()
        self._turns = asyncio.Semaphore(limits.calls_max)
        self._up: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="libp2p", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    async def start(self) -> None:
        """Start the thread and wait until it can dial."""
        self._thread.start()
        try:
            async with asyncio.timeout(self._limits.start_timeout_s):
                await self._up
        except TimeoutError:
            raise Unreachable("py-libp2p", (), self._limits.start_timeout_s, "it did not start") from None

    async def stop(self) -> None:
        """End every connection and the thread."""
        if self.alive and self._up.done() and not self._up.exception():
            self._token.run_sync_soon(self._nursery.cancel_scope.cancel)
        await asyncio.to_thread(self._thread.join, self._limits.start_timeout_s)

    async def connect(self, multiaddr: str, timeout_s: float) -> bytes:
        """Connect to "/ip4/.../tcp/.../p2p/12D3...". Returns the peer's id. Raises BadConfiguration, Unreachable."""
        try:
            info = info_from_p2p_addr(Multiaddr(multiaddr))
        except Exception as error:  # noqa: BLE001 - the parsers raise many kinds
            why = f"{error}; it should look like /ip4/1.2.3.4/tcp/31337/p2p/12D3KooW..."
            raise BadConfiguration(f"peer address {multiaddr[:200]!r}", why[:300]) from None
        await self._do(lambda: self._connect(info), str(info.peer_id), timeout_s)
        return bytes(info.peer_id.to_bytes())

    async def call(self, peer: bytes, method: str, data: bytes, timeout_s: float, via: bytes | None = None) -> bytes:
        """Make one unary call of hivemind's. via: a peer that knows the addresses of this one. Raises Unreachable."""
        called = ID(peer)
        return await self._do(lambda: self._call(called, method, data, via), str(called), timeout_s)

    # --- from loop to thread and back --------------------------------------------------------------------------------

    async def _do(self, work: Callable[[], Awaitable[Result]], peer: str, timeout_s: float) -> Result:
        if len(self._pending) >= self._limits.waiting_max:
            raise Unreachable(peer, (), 0.0, "too many calls are under way")
        future: asyncio.Future[Result] = self._loop.create_future()
        self._pending.add(future)
        try:
            async with self._turns:
                if not self.alive:
                    raise Unreachable(peer, (), 0.0, "py-libp2p has ended")
                self._token.run_sync_soon(self._nursery.start_soon, self._job, work, future, peer, timeout_s)
                return await future
        finally:
            self._pending.discard(future)

    async def _job(
        self, work: Callable[[], Awaitable[Any]], future: asyncio.Future[Any], peer: str, timeout_s: float
    ) -> None:
        """Run in the thread: one request, its deadline, and its answer on the way back."""
        result, failure = None, None
        try:
            with trio.fail_after(timeout_s):
                result = await work()
        except trio.TooSlowError:
            failure = Unreachable(peer, (), timeout_s)
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - py-libp2p raises many kinds, and groups of them
            failure = Unreachable(peer, (), 0.0, f"{type(error).__name__}: {error}"[:200])
        self._loop.call_soon_threadsafe(_settle, future, result, failure)

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        why = "it was stopped"
        try:
            trio.run(self._live)
        except BaseException as error:  # noqa: BLE001 - it ends this thread and nothing else
            why = f"{type(error).__name__}: {error}"[:200]
            _log.warning("py-libp2p ended", why=why)
        finally:
            self._loop.call_soon_threadsafe(self._ended, why)

    def _ended(self, why: str) -> None:
        for future in (self._up, *self._pending):
            _settle(future, None, Unreachable("py-libp2p", (), 0.0, why))

    async def _live(self) -> None:
        libp2p_swarm._HAPPY_EYEBALLS_DELAY = 0.005  # else every first dial waits for 250 ms
        keys = create_new_key_pair()
        noise = NoiseTransport(keys, noise_privkey=create_new_x25519_key_pair().private_key)
        # By default it would offer secio and plaintext, too.
        self._host = new_host(key_pair=keys, sec_opt={NOISE_PROTOCOL_ID: noise})
        async with self._host.run(listen_addrs=[]):
            try:
                async with trio.open_nursery() as nursery:
                    self._nursery, self._token = nursery, trio.lowlevel.current_trio_token()
                    self._loop.call_soon_threadsafe(_settle, self._up, None, None)
                    await trio.sleep_forever()
            finally:
                await self._hang_up()

    async def _hang_up(self) -> None:
        """Close all connections at once: py-libp2p would leave their sockets open."""

        async def close(connection: INetConn) -> None:
            with contextlib.suppress(Exception):
                await connection.close()

        with trio.move_on_after(self._limits.close_timeout_s):
            async with trio.open_nursery() as nursery:
                for connection in self._host.get_network().get_connections():
                    nursery.start_soon(close, connection)

    async def _connect(self, info: PeerInfo) -> None:
        self._host.get_peerstore().add_addrs(
            info.peer_id, info.addrs[: self._limits.addresses_max], self._limits.addresses_live_s
        )
        await self._host.connect(info)

    async def _call(self, peer: ID, method: str, data: bytes, via: bytes | None) -> bytes:
        if via is not None and not self._knows(peer):
            await self._learn_addresses(peer, ID(via))
        call = CallRequest(peer=peer.to_bytes(), proto=method, data=data)
        frame = Frame(callId=secrets.token_bytes(16), callUnary=call).SerializeToString()
        answer = Frame.FromString(await self._exchange(peer, TProtocol(method), frame)).unaryResponse
        if answer.error:
            raise ValueError(answer.error.decode(errors="replace")[:200])
        return bytes(answer.response)

    def _knows(self, peer: ID) -> bool:
        try:
            return bool(self._host.get_network().get_connections(peer) or self._host.get_peerstore().addrs(peer))
        except PeerStoreError:
            return False

    async def _learn_addresses(self, peer: ID, via: ID) -> None:
        request = KadMessage(type=KadMessage.MessageType.FIND_NODE, key=peer.to_bytes(), clusterLevelRaw=10)
        kad = TProtocol("/ipfs/kad/1.0.0")
        answer = KadMessage.FromString(await self._exchange(via, kad, request.SerializeToString()))
        for closer in answer.closerPeers:
            if closer.id == peer.to_bytes():
                told = [Multiaddr(address) for address in list(closer.addrs)[: self._limits.addresses_max]]
                addresses = [address for address in told if is_told_well(str(address), self._public)]
                self._host.get_peerstore().add_addrs(peer, addresses, self._limits.addresses_live_s)

    async def _exchange(self, peer: ID, protocol: TProtocol, message: bytes) -> bytes:
        """Send one length-prefixed message on a new stream and return the one that comes back."""
        stream = await self._host.new_stream(peer, [protocol])
        try:
            await stream.write(varint(len(message)) + message)
            size = await _read_varint(stream)
            if size > self._limits.answer_bytes_max:
                raise ValueError(f"its answer has {size} bytes")
            return await _read_exactly(stream, size)
        finally:
            with trio.move_on_after(1) as closing:
                closing.shield = True
                await stream.reset()


async def _read_exactly(stream: Any, size: int) -> bytes:  # noqa: ANN401 - py-libp2p's stream
    parts: list[bytes] = []
    missing = size
    while missing:
        part = await stream.read(min(missing, 1 << 20))
        if not part:
            raise EOFError("its answer is cut off")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


async def _read_varint(stream: Any) -> int:  # noqa: ANN401 - py-libp2p's stream
    number = 0
    for shift in range(0, 35, 7):
        (byte,) = await _read_exactly(stream, 1)
        number |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return number
    raise ValueError("its answer has no length")


def _settle(future: asyncio.Future[Any], result: object, failure: Exception | None) -> None:
    if future.done():  # the asker has gone
        return
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(result)
