"""The parts of the commands that several of them share."""

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
