"""Tests that need the machine for themselves get it."""

import fcntl
import threading
from pathlib import Path

from tests.support.alone import locked
from tests.support.swarms import eventually


def test_one_that_is_alone_waits_for_the_others_and_is_not_overtaken(tmp_path: Path) -> None:
    room, order = tmp_path / "run", list[str]()
    waiting = {name: threading.Event() for name in ("alone", "later")}

    def enter(name: str, *, alone: bool) -> None:
        waiting[name].set()
        with locked(room, alone=alone):
            order.append(name)

    with locked(room, alone=False), locked(room, alone=False):
        first = threading.Thread(target=enter, args=("alone",), kwargs={"alone": True})
        first.start()
        assert waiting["alone"].wait(10)
        eventually(lambda: _is_taken(room.with_suffix(".gate")), 10)
        later = threading.Thread(target=enter, args=("later",), kwargs={"alone": False})
        later.start()
        assert waiting["later"].wait(10)
        assert order == []
    first.join(10)
    later.join(10)
    assert order == ["alone", "later"]


def _is_taken(path: Path) -> bool:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
