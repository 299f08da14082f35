"""A server imports what it needs, and no more."""

import subprocess
import sys

PROGRAM = """
import sys
from swarm.server.lean import leave_out_what_no_server_needs
leave_out_what_no_server_needs()
import swarm.server.serve
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"scipy", "libp2p", "IPython"}))
print(*[name for name in ("hivemind.averaging", "hivemind.moe", "hivemind.optim") if name in sys.modules])
"""


def test_a_server_imports_neither_scipy_nor_hiveminds_training_half():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
