"""What is built is what is tracked: the three folders under their one import name, with the checkpoint and py.typed."""

import configparser
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SIDES = ("client", "server", "dht")  # real folders here, links inside swarm/


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    """The paths of all files that git knows and that exist, the links themselves left out."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is nothing to compare with")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def distributions(tracked: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel and an sdist, built from a copy of the tracked files and nothing else, and a wheel of that sdist."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    for side in SIDES:
        (source / "swarm" / side).symlink_to(Path("..") / side)
    build(source, built)
    (built / "unpacked").mkdir()
    sdist = next(built.glob("*.tar.gz"))
    subprocess.run(["tar", "-xf", sdist, "-C", built / "unpacked"], check=True)  # tarfile's filters are new in 3.11.4
    (unpacked,) = (built / "unpacked").iterdir()
    build(unpacked, built / "from_sdist", "--wheel")
    return built


def build(source: Path, out: Path, *what: str) -> None:
    """Build with what is installed here: no isolation, so nothing is downloaded."""
    command = [sys.executable, "-m", "build", "--no-isolation", *(what or ("--wheel", "--sdist")), "--outdir", str(out)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def wheel_members(directory: Path) -> set[str]:
    """The files of the directory's wheel, without its metadata."""
    (wheel,) = directory.glob("*.whl")
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def sdist_members(directory: Path) -> set[str]:
    with tarfile.open(next(directory.glob("*.tar.gz"))) as sdist:
        return {member.name.partition("/")[2] for member in sdist if member.isfile()}


def installed_names(tracked: set[str]) -> set[str]:
    """Where the tracked files of the package belong once they are installed."""
    here = {name for name in tracked if name.startswith("swarm/")}
    return here | {f"swarm/{name}" for name in tracked if name.startswith(tuple(f"{side}/" for side in SIDES))}


@pytest.mark.long
def test_the_wheel_has_exactly_the_tracked_files_of_the_package(tracked: set[str], distributions: Path) -> None:
    assert wheel_members(distributions) == installed_names(tracked)


@pytest.mark.long
def test_the_wheel_installs_one_top_level_package(distributions: Path) -> None:
    assert {name.partition("/")[0] for name in wheel_members(distributions)} == {"swarm"}


@pytest.mark.long
def test_checkpoint_draft_and_type_marker_are_in_the_wheel(distributions: Path) -> None:
    checkpoint = {f"swarm/demo/checkpoint/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")}
    draft = {f"swarm/demo/draft/{name}" for name in ("draft.json", "draft.safetensors")}
    assert checkpoint | draft | {"swarm/py.typed", "swarm/client/__init__.py"} <= wheel_members(distributions)


def test_the_sdist_builds_the_same_wheel(distributions: Path) -> None:
    assert wheel_members(distributions / "from_sdist") == wheel_members(distributions)


def test_the_sdist_has_what_a_packager_needs(tracked: set[str], distributions: Path) -> None:
    wanted = {name for name in tracked if name.startswith(("tests/", "docs/", "examples/", "benchmarks/"))}
    wanted |= {"LICENSE", "Makefile", "constraints.txt", "pyproject.toml", "setup.cfg"} | installed_names(tracked)
    assert wanted <= sdist_members(distributions)


def test_windows_is_not_asked_for_hivemind_or_uvloop() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = [Requirement(line) for line in config["options"]["install_requires"].splitlines() if line.strip()]
    unix = {"sys_platform": "linux", "platform_system": "Linux"}
    windows = {"sys_platform": "win32", "platform_system": "Windows"}
    asked = [
        {line.name for line in lines if line.marker is None or line.marker.evaluate(system)}
        for system in (unix, windows)
    ]
    assert asked[0] - asked[1] == {"hivemind", "uvloop"}
