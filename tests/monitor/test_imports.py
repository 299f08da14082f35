"""What the health page must not load, and how little memory it may take."""

import subprocess
import sys

from tests.monitor import needs_light

PROGRAM = """
import sys
import swarm.monitor.cli, swarm.monitor.serve, swarm.dht.light.host
print([name for name in ("torch", "hivemind", "transformers", "numpy") if name in sys.modules])
print(int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) // 1024)
"""


@needs_light
def test_the_page_and_the_light_reader_load_neither_torch_nor_hivemind():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    heavy, megabytes = run.stdout.splitlines()
    assert heavy == "[]"
    assert int(megabytes) < 150


def test_a_handshake_needs_no_torch():
    program = "import sys, swarm.net.dialer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
