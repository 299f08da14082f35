"""Verified bytes for libraries that read paths."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from swarm.errors import CheckpointError


@contextlib.contextmanager
def staged(files: Mapping[str, bytes]) -> Iterator[Path]:
    """A directory of this process alone that has these files: `transformers` reads paths. Raises CheckpointError."""
    with contextlib.ExitStack() as stack:
        try:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-load-")))
            for name, data in files.items():
                path = directory / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(data)
        except OSError as error:
            names, why = ", ".join(files), error.strerror or str(error)
            raise CheckpointError(
                f"cannot write a temporary copy of {names}: {why}; make room, or set TMPDIR"
            ) from None
        yield directory
