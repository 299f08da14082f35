"""The lab's internet: passes IPv4 packets between sites, with delays, and counts bytes. A program of its own.

It runs in the namespace where one end of each site's cable is. Packets keep the kernel's offload header, so a large
segment passes in one piece and its checksum is left to the receiver. It reads one JSON command a line and answers
each; it ends with its input. It imports the standard library only.
"""

import contextlib
import heapq
import json
import select
import socket
import time
from typing import Any

SOL_PACKET, PACKET_VNET_HDR = 263, 15  # of linux/if_packet.h
SO_RCVBUFFORCE = 33  # of asm-generic/socket.h
ETH_P_IP = 0x0800
OFFLOAD_BYTES = 10  # struct virtio_net_hdr
DESTINATION = slice(OFFLOAD_BYTES + 14 + 16, OFFLOAD_BYTES + 14 + 20)
IP_LENGTH = OFFLOAD_BYTES + 14  # where the bytes of an IP packet begin
PACKET_BYTES = OFFLOAD_BYTES + 14 + 65536
BURST = 64  # packets of one site in turn
QUEUED_BYTES = 64 << 20  # under way at one time; a packet beyond is dropped
RECEIVED_BYTES = 8 << 20  # of a site's socket, where the kernel allows it


class Cable:
    """The end of one site's cable."""

    def __init__(self, interface: str, address: str, delay_s: float) -> None:
        self.address = socket.inet_aton(address)
        self.delay_s = delay_s
        self.connected = True
        self.sent: dict[str, int] = {}  # bytes of IP packets, by the receiver's interface
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_IP))
        self.socket.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        with contextlib.suppress(PermissionError):
            self.socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVED_BYTES)
        self.socket.bind((interface, ETH_P_IP))
        self.socket.setblocking(False)


class Internet:
    """All cables, and the packets under way."""

    def __init__(self) -> None:
        self.cables: dict[str, Cable] = {}
        self.dropped = 0  # packets
        self._names: dict[bytes, str] = {}  # by address
        self._under_way: list[tuple[float, int, Cable, bytes]] = []
        self._queued_bytes = 0
        self._count = 0
        self._buffer = memoryview(bytearray(PACKET_BYTES))

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """Change a site, or make it. Returns the bytes that all sites have sent, and the packets dropped."""
        if (name := command.get("site")) is not None:
            if name not in self.cables:
                self.cables[name] = Cable(name, command["address"], 0.0)
            cable = self.cables[name]
            if "address" in command:
                cable.address = socket.inet_aton(command["address"])
            cable.delay_s = command.get("delay_s", cable.delay_s)
            cable.connected = command.get("connected", cable.connected)
            self._names = {cable.address: name for name, cable in self.cables.items()}
        return {"sent": {name: cable.sent for name, cable in self.cables.items()}, "dropped": self.dropped}

    def take(self, cable: Cable) -> None:
        """Read what a site has sent."""
        now = time.monotonic()
        for _ in range(BURST):
            try:
                length = cable.socket.recv_into(self._buffer)
            except BlockingIOError:
                return
            except OSError:  # the interface is down
                return
            packet = bytes(self._buffer[:length])
            name = self._names.get(packet[DESTINATION])
            if name is None or not cable.connected or self._queued_bytes > QUEUED_BYTES:
                self.dropped += 1
                continue
            cable.sent[name] = cable.sent.get(name, 0) + length - IP_LENGTH
            target = self.cables[name]
            self._count += 1  # keeps the order of equal times
            self._queued_bytes += length
            heapq.heappush(self._under_way, (now + cable.delay_s + target.delay_s, self._count, target, packet))

    def deliver(self) -> float | None:
        """Deliver what is due. Returns the seconds until the next packet is; None: none is under way."""
        while self._under_way:
            wait_s = self._under_way[0][0] - time.monotonic()
            if wait_s > 0:
                return wait_s
            _, _, target, packet = heapq.heappop(self._under_way)
            self._queued_bytes -= len(packet)
            try:
                if target.connected:
                    target.socket.send(packet)
            except OSError:  # its queue is full, or its interface is down
                self.dropped += 1
        return None


def main() -> None:
    """Serve until the end of input."""
    internet = Internet()
    with socket.socket(fileno=0) as control:
        lines = control.makefile("rb")
        while True:
            cables = {cable.socket: cable for cable in internet.cables.values()}
            readable, _, _ = select.select([control, *cables], [], [], internet.deliver())
            for one in readable:
                if one is not control:
                    internet.take(cables[one])
            if control in readable:
                line = lines.readline()  # one at a time: each waits for its answer
                if not line:
                    return
                control.sendall(json.dumps(internet.obey(json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    main()
