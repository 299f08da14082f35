"""Who may read or write a file, as its mode and its owner say."""

import os


def is_open(mode: int, bits: int = 0o077) -> bool:
    """Return whether a file's mode gives others any of these bits. Windows has access lists, and no modes: False."""
    return os.name != "nt" and bool(mode & bits)


def is_own(status: os.stat_result) -> bool:
    """Return whether a file or folder is this user's, and no other's to write to. Windows has neither mark: True."""
    return os.name == "nt" or (status.st_uid == os.geteuid() and not is_open(status.st_mode, 0o022))
