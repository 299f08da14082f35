"""One request to the router by datagrams, until it answers or the time is over."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

from swarm.net.mapping.limits import MappingLimits
from swarm.net.mapping.way import By, Malformed, MappingFailed

Read = TypeVar("Read")
Destination: TypeAlias = tuple[str, int]


class Question(asyncio.DatagramProtocol, Generic[Read]):
    """Reads datagrams until one is an answer. Datagrams from other addresses are ignored.

    read: raises Malformed, after which others are waited for, or MappingFailed, which is the answer.
    """

    def __init__(self, host: str, read: Callable[[bytes], Read], limits: MappingLimits) -> None:
        self.answer: asyncio.Future[Read] = asyncio.get_running_loop().create_future()
        self.malformed = ""  # why the last one was
        self._host, self._read, self._bytes_max = host, read, limits.answer_bytes_max

    def datagram_received(self, data: bytes, addr: tuple[str | int, ...]) -> None:
        """Take one datagram."""
        if self.answer.done() or addr[0] != self._host:
            return
        try:
            if len(data) > self._bytes_max:
                raise Malformed(f"{len(data)} bytes")
            self.answer.set_result(self._read(data))
        except Malformed as error:
            self.malformed = str(error)
        except MappingFailed as error:
            self.answer.set_exception(error)

    def error_received(self, exc: Exception) -> None:
        """End it when the router says that nothing listens there."""
        if isinstance(exc, ConnectionRefusedError) and not self.answer.done():
            self.answer.set_exception(exc)


async def ask(
    by: By,
    sock: socket.socket,
    sends: Sequence[tuple[bytes, Destination | None]],
    question: Question[Read],
    within_s: float,
    limits: MappingLimits,
) -> Read:
    """Send all `sends`, again after `limits.resend_s`, and return what the question reads. Closes the socket.

    sends: each a datagram and where it goes; None: whereto the socket is connected. Raises MappingFailed.
    """
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: question, sock=sock)
    try:
        async with asyncio.timeout(within_s):
            for pause_s in (*limits.resend_s, within_s):
                for data, to in sends:
                    transport.sendto(data, to)
                await asyncio.wait((question.answer,), timeout=pause_s)
                if question.answer.done():
                    break
            return await question.answer
    except ConnectionRefusedError:
        raise MappingFailed(by, "the router does not speak it") from None
    except TimeoutError:
        why = f"a malformed answer: {question.malformed}" if question.malformed else f"no answer in {within_s:.1f} s"
        raise MappingFailed(by, why) from None
    finally:
        transport.close()


def connected(host: str, port: int) -> socket.socket:
    """Return a socket to which the kernel gives datagrams of this address and port only."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        sock.connect((host, port))
    except OSError:
        sock.close()
        raise
    return sock
