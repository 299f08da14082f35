"""Which way a reader takes into the directory."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from swarm.dht.reading import chosen
from swarm.errors import BadConfiguration


class Installed:
    """The two libraries as a process finds them: installed, loaded, with or without p2pd."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._patch, self._folder = monkeypatch, folder
        self._found: dict[str, ModuleSpec | None] = {"hivemind": None, "libp2p": None}
        monkeypatch.setattr(importlib.util, "find_spec", self._found.get)
        for name in self._found:
            monkeypatch.delitem(sys.modules, name, raising=False)

    def install(self, name: str, *, p2pd: bool = False) -> "Installed":
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(self._folder)]
        self._found[name] = spec
        if p2pd:
            (self._folder / "hivemind_cli").mkdir()
            (self._folder / "hivemind_cli" / "p2pd").touch()
        return self

    def load(self, name: str) -> None:
        self._patch.setitem(sys.modules, name, ModuleType(name))


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Installed:
    return Installed(monkeypatch, tmp_path)


def test_p2pd_is_taken_where_both_are_installed(process: Installed) -> None:
    process.install("hivemind", p2pd=True).install("libp2p")
    assert chosen("auto") == "p2pd"
    assert chosen("light") == "light"


def test_light_is_taken_where_hivemind_or_its_program_is_missing(process: Installed) -> None:
    process.install("libp2p")
    assert chosen("auto") == "light"
    process.install("hivemind")
    assert chosen("auto") == "light"


def test_light_is_taken_again_where_it_has_been_loaded(process: Installed) -> None:
    process.install("hivemind", p2pd=True).install("libp2p").load("libp2p")
    assert chosen("auto") == "light"


def test_one_process_refuses_to_load_both_libraries(process: Installed) -> None:
    process.install("hivemind", p2pd=True).install("libp2p").load("hivemind")
    assert chosen("auto") == "p2pd"
    with pytest.raises(BadConfiguration, match="this process has loaded hivemind: the two do not share a process"):
        chosen("light")


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("auto", r"libp2p, which is not installed: pip install swarm-inference\[light\]"),
        ("p2pd", r"hivemind, which is not installed: pip install hivemind"),
    ],
)
@pytest.mark.usefixtures("process")
def test_a_way_without_its_library_is_refused(way: str, why: str) -> None:
    with pytest.raises(BadConfiguration, match=why):
        chosen(way)  # type: ignore[arg-type]
