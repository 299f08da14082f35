"""Labs of network namespaces; skipped where this user cannot have any."""

from collections.abc import Iterator

import pytest

from tests.support.lab import Lab, unavailable


@pytest.fixture(scope="session")
def _possible() -> None:
    if reason := unavailable():
        pytest.skip(reason)


@pytest.fixture
def lab(_possible: None) -> Iterator[Lab]:
    """A lab of the test's own, empty."""
    with Lab() as made:
        yield made
