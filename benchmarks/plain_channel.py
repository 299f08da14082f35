"""Frames that are not sealed, for `encryption.py` alone: nothing that users run can do this.

As a command it runs a module of the swarm with such frames: `python plain_channel.py swarm.server.cli ...`.
"""

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from swarm.net import greeting
from swarm.net.frames import TAG_BYTES, Sealer

EMPTY_TAG = bytes(TAG_BYTES)


class Plain(Sealer):
    """Frames of the same size and form, whose content is neither encrypted nor authenticated."""

    def seal(self, parts: Sequence[bytes | memoryview]) -> bytes:
        """As `Sealer.seal`."""
        plaintext = b"".join(parts)
        length = (len(plaintext) + TAG_BYTES).to_bytes(4, "big")
        return length + plaintext + EMPTY_TAG

    def open(self, length: bytes, ciphertext: memoryview) -> bytearray:
        """As `Sealer.open`."""
        return bytearray(ciphertext[:-TAG_BYTES])


@contextmanager
def plain_channels() -> Iterator[None]:
    """Channels that are made within the block have plain frames. Both sides must."""
    sealer = greeting.Sealer
    greeting.Sealer = Plain  # type: ignore[misc]
    try:
        yield
    finally:
        greeting.Sealer = sealer  # type: ignore[misc]


if __name__ == "__main__":
    module, sys.argv = sys.argv[1], sys.argv[1:]
    with plain_channels():
        runpy.run_module(module, run_name="__main__", alter_sys=True)
