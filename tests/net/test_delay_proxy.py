"""The proxy that makes a wide-area network of one machine."""

import socket
import threading
import time
from contextlib import contextmanager

from swarm.demo.delay_proxy import Proxy
from swarm.demo.distance import free_ports


@contextmanager
def proxied(delay_s, **line):
    """Yield both ends of a connection through a proxy."""
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = Proxy(delay_s, **line)
        proxy.listen(f"127.0.0.1:{port}", f"127.0.0.1:{listener.getsockname()[1]}")
        thread = threading.Thread(target=proxy.run)
        thread.start()
        try:
            with socket.create_connection(("127.0.0.1", port)) as near, listener.accept()[0] as far:
                yield near, far
                near.shutdown(socket.SHUT_WR)
                far.shutdown(socket.SHUT_WR)
                assert near.recv(1) == b""  # the end came through the proxy, which has closed its sockets
        finally:
            proxy.stop()
            thread.join()
            for each in proxy._listeners:
                each.close()


def passed(near, far, data):
    """Send bytes one way, and return how long it takes until all are there."""
    began = time.monotonic()
    sender = threading.Thread(target=near.sendall, args=(data,))
    sender.start()
    came = bytearray()
    while len(came) < len(data):
        came += far.recv(1 << 16)
    sender.join()
    assert came == data
    return time.monotonic() - began


def test_bytes_come_late_in_both_directions():
    with proxied(0.05) as (near, far):
        assert passed(near, far, b"there") >= 0.05
        assert passed(far, near, b"back") >= 0.05


def test_a_limited_line_takes_its_time_for_each_byte():
    data = bytes(range(256)) * 1000
    with proxied(0.01, mbit_s=8.0) as (near, far):
        assert passed(near, far, data) >= 0.256
        assert passed(far, near, data[:1000]) < 0.2  # the other direction has a line of its own
    with proxied(0.01) as (near, far):
        assert passed(near, far, data) < 0.2
