"""Verified bytes for libraries that read paths."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path


@contextlib.contextmanager
def staged(files: Mapping[str, bytes]) -> Iterator[Path]:
    """A directory of this process alone that has these files: `transformers` reads paths."""
    with tempfile.TemporaryDirectory(prefix="swarm-load-") as directory:
        for name, data in files.items():
            path = Path(directory, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        yield Path(directory)
