"""A server imports what it needs, and no more."""

from pathlib import Path

import pytest

from tests.support import warm


@pytest.mark.long
def test_a_server_imports_neither_scipy_nor_hiveminds_training_half(tmp_path: Path) -> None:
    """Seen in a fork of the process that imported all that a server does."""
    code, printed = warm.start(tmp_path, "tests.support.imported").ended()
    assert code == 0
    names = printed.split()
    assert {"swarm.server.serve", "torch", "transformers", "hivemind.p2p"} <= set(names)
    unwanted = ("scipy", "libp2p", "IPython", "hivemind.averaging", "hivemind.moe", "hivemind.optim")
    assert [name for name in names if name.startswith(unwanted)] == []
