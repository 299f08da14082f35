"""Errors out of task groups: the one that counts, instead of a group around it."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ungrouped() -> Iterator[None]:
    """Raise the error itself where a TaskGroup within the block raises a group of one."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise _only(group) from None


def _only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    if len(group.exceptions) > 1:
        return group
    inner = group.exceptions[0]
    return _only(inner) if isinstance(inner, BaseExceptionGroup) else inner
