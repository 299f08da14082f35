"""The parts of the commands that several of them share."""

import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from swarm.commands import importing
from swarm.options import Reading, reading_options


def test_missing_library_names_the_extra_that_has_it() -> None:
    with (
        pytest.raises(click.UsageError, match=r"no_such is missing: .*swarm-inference\[health\]"),
        importing("health", "page"),
    ):
        raise ModuleNotFoundError("No module named 'no_such'", name="no_such")


def test_command_gets_its_swarm_as_one_value() -> None:
    got: list[object] = []

    @click.command()
    @click.option("--other")
    @reading_options("join")
    def command(reading: Reading, other: str) -> None:
        got.extend([reading, other])

    arguments = ["--initial-peers", "a,b", "--network", "mine", "--other", "x"]
    assert CliRunner().invoke(command, arguments).exit_code == 0
    assert got == [Reading(("a", "b"), "mine", None, None, None), "x"]


ENDS = """
import asyncio, os, signal, sys, threading
from pathlib import Path
from huggingface_hub import file_download
from swarm.commands import _leave, run_until_stopped

def fetch(url, file, **_):
    file.write(b"half of it")
    file.flush()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()

def download():
    file_download._download_to_tmp_and_move(
        incomplete_path=Path(sys.argv[1], "etag.incomplete"), destination_path=Path(sys.argv[1], "etag"),
        url_to_download="", headers={}, expected_size=None, filename="", force_download=False, etag="",
        xet_file_data=None,
    )

async def main(stop):
    threading.Thread(target=download, daemon=True).start()
    if sys.argv[2] == "twice":
        await stop.wait()
        os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.Event().wait()

file_download.http_get = fetch
run_until_stopped(main, "info")
_leave(0)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be deleted there")
@pytest.mark.parametrize(("signals", "code"), [("once", 0), ("twice", 128 + signal.SIGTERM)])
@pytest.mark.slow("a process starts, with the hub's library")
def test_command_that_is_stopped_leaves_no_half_of_a_download(tmp_path: Path, signals: str, code: int) -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS, str(tmp_path), signals], timeout=60, check=False)
    assert ended.returncode == code
    assert not list(tmp_path.iterdir())
