"""What a lab leaves behind: nothing. And where it can be had."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.nat.sockets import WITHIN_S, connected
from tests.support.lab import Lab, LabError, namespaces, unavailable
from tests.support.swarms import REPOSITORY, eventually

HOLDS_A_LAB = """
import time
from tests.support.lab import Lab
with Lab() as lab:
    host = lab.site("port_restricted").host()
    print(host.namespace.pid, flush=True)
    while True:
        time.sleep(0.1)  # signal.pause() misses a signal just before it
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.usefixtures("_possible")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_after_an_error(error: type[BaseException]):
    with suppress(error), Lab() as lab:
        host = lab.site("double").host()
        process = host.popen(["sleep", "1000"])
        # an orphan in a session of its own, which the lab did not start
        orphan = int(host.run(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"]))
        assert is_running(orphan)
        raise error
    assert process.returncode == -signal.SIGTERM
    assert not is_running(orphan)
    assert not is_running(host.namespace.pid)


@pytest.mark.usefixtures("_possible")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_namespaces_end_with_the_process_that_made_them(sent: signal.Signals):
    line = [sys.executable, "-c", f"import signal; signal.signal(2, signal.default_int_handler)\n{HOLDS_A_LAB}"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=REPOSITORY) as process:
        assert process.stdout is not None
        holder = int(process.stdout.readline())
        assert is_running(holder)
        process.send_signal(sent)
    eventually(lambda: not is_running(holder), WITHIN_S)


@pytest.mark.usefixtures("_possible")
def test_a_failing_command_says_what_it_printed(lab: Lab):
    with pytest.raises(LabError, match="no such thing"):
        lab.public_host().run(["sh", "-c", "echo no such thing >&2; exit 3"])


def test_a_missing_program_is_named():
    with patch.object(namespaces, "PATH", ""):
        namespaces.way.cache_clear()
        try:
            assert unavailable() == "needs ip, nft, nsenter, unshare: apt-get install iproute2 nftables util-linux"
        finally:
            namespaces.way.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="needs network namespaces")
def test_users_have_labs_in_a_user_namespace():
    with patch.object(namespaces.os, "geteuid", lambda: 1000):
        namespaces.way.cache_clear()
        try:
            if reason := unavailable():
                pytest.skip(reason)
            with Lab() as lab:
                caller, callee = lab.site("double").host(), lab.public_host()
                with connected(caller, callee, (callee.address, 7000)) as (_, two):
                    assert two.getpeername()[0] != caller.address
                assert Path(f"/proc/{caller.namespace.pid}/ns/user").readlink() != Path("/proc/self/ns/user").readlink()
                assert os.getuid() == os.stat(f"/proc/{caller.namespace.pid}").st_uid
        finally:
            namespaces.way.cache_clear()
