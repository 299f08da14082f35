"""Every test has five seconds; a slower one is marked `slow`, and says why.

An item is charged its own computing, or the time in which no process of the machine waited for a core, whichever is
more: so other load on the machine costs a test nothing. What fixtures take that several tests share is charged to
none of them. The items beyond the budget are listed when the run is over; one that takes 24 times as much fails.
"""

import os
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

BUDGET_S = 5.0
FAILS_AT = 24.0  # budgets: machines at an eighth of the speed run the tests, too
PRESSURE = Path("/proc/pressure/cpu")  # Linux's; without it waiting is not charged
CHARGED = "charged_s"
LOST = "TESTS_LOST_SHARE"  # from the process that looks (tests/support/machine.py) to those that test


@dataclass(frozen=True, slots=True)
class Moment:
    """What the clocks showed. contended_s: for how long some process has waited for a core since the machine began."""

    wall_s: float
    cpu_s: float
    contended_s: float | None

    @classmethod
    def now(cls) -> "Moment":
        times = os.times()
        return cls(time.monotonic(), sum(times[:4]), _contended_s())


def lost() -> float:
    """Return the share of its time that this machine lost to others when the run began."""
    return float(os.environ.get(LOST, "0"))


def _contended_s() -> float | None:
    try:
        some = PRESSURE.read_text().partition("\n")[0]
    except OSError:
        return None
    return int(some.rpartition("total=")[2]) / 1e6


def charge_s(began: Moment, ended: Moment) -> float:
    """What the time between two moments costs a test."""
    computed = ended.cpu_s - began.cpu_s
    if began.contended_s is None or ended.contended_s is None:
        return computed
    return max(computed, ended.wall_s - began.wall_s - (ended.contended_s - began.contended_s))


class Shared:
    """Time that fixtures of a wider scope than one test took."""

    def __init__(self) -> None:
        self.depth = 0
        self.total_s = 0.0


_shared = Shared()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: "pytest.FixtureDef[object]", request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Add up what shared fixtures take; one that needs another is counted once."""
    del request
    if fixturedef.scope == "function":
        return (yield)
    began = Moment.now()
    _shared.depth += 1
    try:
        return (yield)
    finally:
        _shared.depth -= 1
        if not _shared.depth:
            _shared.total_s += charge_s(began, Moment.now())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Charge the set-up, less what is shared."""
    began, shared_s = Moment.now(), _shared.total_s
    try:
        return (yield)
    finally:
        charged_s = charge_s(began, Moment.now()) - (_shared.total_s - shared_s)
        item.user_properties.append((CHARGED, charged_s))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Charge the test, and fail it where it is far beyond the budget."""
    began = Moment.now()
    try:
        returned = yield
    finally:
        charged_s = charge_s(began, Moment.now())
        item.user_properties.append((CHARGED, charged_s))
    total_s = sum(value for name, value in item.user_properties if name == CHARGED)
    if total_s * (1 - lost()) > FAILS_AT * BUDGET_S and not _is_excused(item):
        pytest.fail(f"{total_s:.1f} s: mark it slow, with a reason, or make it quick", pytrace=False)
    return returned


def _is_excused(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) is not None for name in ("slow", "long"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tell the process that prints which items may be slow. A `slow` without a reason is an error."""
    for item in items:
        for mark in item.iter_markers("slow"):
            if not (len(mark.args) == 1 and isinstance(mark.args[0], str) and not mark.kwargs):
                raise pytest.UsageError(f"{item.nodeid}: slow needs a reason")
        if _is_excused(item):
            item.user_properties.append(("excused", True))


class Charges:
    """What the items of a run were charged, wherever they ran."""

    def __init__(self) -> None:
        self.beyond: list[tuple[float, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = report.user_properties
        if report.when != "teardown" or ("excused", True) in properties:
            return
        charged_s = sum(float(str(value)) for name, value in properties if name == CHARGED)
        if charged_s > BUDGET_S:
            self.beyond.append((charged_s, report.nodeid))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.beyond:
            terminalreporter.section(f"more than {BUDGET_S:g} s, and not marked slow")
        for charged_s, nodeid in sorted(self.beyond, reverse=True):
            terminalreporter.line(f"{charged_s:6.1f} s  {nodeid}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Charges(), "charges")
