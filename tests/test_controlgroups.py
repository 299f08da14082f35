"""How much memory control groups leave, from trees of files as Linux has them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from swarm.compute.controlgroups import Places, bytes_left
from swarm.gateway import models
from swarm.server import measure

MIB = 1 << 20
UNLIMITED_V1 = 0x7FFFFFFFFFFFF000


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path / "cgroup", tmp_path / "mounted")


def in_group(places: Places, line: str) -> None:
    places.groups.write_text(f"{line}\n")


def group(places: Places, path: str, inactive: int = 0, **files: int | str) -> None:
    """Make a group of version 2 that holds so much file cache."""
    folder = places.mounted / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.stat").write_text(f"anon 5\nfile {inactive + 7}\ninactive_file {inactive}\nactive_file 7\n")
    for name, value in files.items():
        (folder / f"memory.{name}").write_text(f"{value}\n")


def test_a_service_has_what_its_unit_leaves_it(places: Places):
    in_group(places, "0::/system.slice/swarm-serve@a.service")
    group(places, "system.slice/swarm-serve@a.service", inactive=30 * MIB, max=100 * MIB, high="max", current=50 * MIB)
    group(places, "system.slice", max="max", current=900 * MIB)
    group(places, "")
    assert bytes_left(places) == 80 * MIB


@pytest.mark.parametrize(("around", "left"), [(1000, 10), (70, 0)])
def test_a_limit_around_a_group_counts_with_what_others_use(places: Places, around: int, left: int):
    in_group(places, "0::/a/b")
    group(places, "a/b", max=100 * MIB, current=50 * MIB)
    group(places, "a", max=1000 * MIB, high=around * MIB, current=990 * MIB)
    assert bytes_left(places) == left * MIB


@pytest.mark.parametrize("path", ["/", "/../../docker/x"])
def test_a_container_has_the_limit_of_its_own_root(places: Places, path: str):
    in_group(places, f"0::{path}")
    group(places, "", max=512 * MIB, current=12 * MIB)
    assert bytes_left(places) == 500 * MIB


def test_version_1_is_read_too(places: Places):
    in_group(places, "11:cpu,cpuacct:/\n4:memory:/docker/x\n0::/system.slice")
    for path, limit in (("docker/x", 100 * MIB), ("docker", UNLIMITED_V1)):
        folder = places.mounted / "memory" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{60 * MIB}\n")
        (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {20 * MIB}\n")
    assert bytes_left(places) == 60 * MIB


@pytest.mark.parametrize("text", ["", "0::/a", "nothing of this kind", "0::/broken"])
def test_without_a_limit_nothing_is_said(places: Places, text: str):
    in_group(places, text)
    group(places, "a", max="max", high="max", current=5)
    group(places, "broken", max=5, current="much")
    assert bytes_left(places) is None
    assert bytes_left(Places(places.mounted / "nowhere")) is None


@pytest.mark.parametrize(("left", "free"), [(None, 1000), (300, 300), (5000, 1000)])
def test_a_server_takes_no_more_than_its_groups_leave(monkeypatch: pytest.MonkeyPatch, left: int | None, free: int):
    monkeypatch.setattr(measure.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    monkeypatch.setattr(measure, "bytes_left", lambda: left)
    assert measure.free_bytes(torch.device("cpu")) == free


@pytest.mark.parametrize(("left", "half"), [(None, 500), (300, 150), (5000, 500)])
def test_a_gateway_gives_models_half_of_what_its_groups_leave(
    monkeypatch: pytest.MonkeyPatch, left: int | None, half: int
):
    monkeypatch.setattr(models.psutil, "virtual_memory", lambda: SimpleNamespace(total=1000))
    monkeypatch.setattr(models, "bytes_left", lambda: left)
    assert models.half_of_memory() == half
