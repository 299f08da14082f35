"""Keeps a network namespace alive, and makes sockets in it for the process that holds the other end of standard input.

A program of its own that imports the standard library only. Each byte that it reads is a kind of socket; the answer is
that socket. It ends, and its namespace with it, when the other end is closed.
"""

import socket

READY = b"+"


def main() -> None:
    """Serve until the end of input."""
    with socket.socket(fileno=0) as asking:
        asking.sendall(READY)
        while kind := asking.recv(1):
            with socket.socket(socket.AF_INET, kind[0]) as made:
                socket.send_fds(asking, [READY], [made.fileno()])


if __name__ == "__main__":
    main()
