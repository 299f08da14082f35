"""Who may read a file that holds a secret, as its mode says."""

import os


def is_open(mode: int, bits: int = 0o077) -> bool:
    """Return whether a file's mode gives others any of these bits. Windows has access lists, and no modes: False."""
    return os.name != "nt" and bool(mode & bits)
