"""The deployment files: systemd accepts the units, they are hardened, and what they name exists."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click import Command

from swarm.dht.cli import command as bootstrap
from swarm.gateway.cli import command as gateway
from swarm.monitor.cli import command as health
from swarm.server.cli import command as serve

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
UNITS = {
    "swarm-bootstrap.service": bootstrap,
    "swarm-gateway.service": gateway,
    "swarm-health.service": health,
    "swarm-serve@.service": serve,
}
EXPOSURE_MAX = 20  # tenths of systemd's scale, on which a unit without any hardening has about 95
HARDENING = (
    "DynamicUser=yes",
    "NoNewPrivileges=yes",
    "ProtectSystem=strict",
    "ProtectHome=yes",
    "CapabilityBoundingSet=",
    "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK",
    "SystemCallFilter=@system-service",
    "LimitNOFILE=65536",
    "KillMode=mixed",
)
analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (systemd)")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units, with commands that exist."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for unit, command in UNITS.items():
        (binaries / str(command.name)).symlink_to("/bin/true")
        text = (DEPLOY / unit).read_text().replace("/opt/swarm/bin", str(binaries))
        (tmp_path / unit.replace("@.", "@gpu0.")).write_text(text)
    return tmp_path


def systemd_analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@analyze
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_the_unit(installed: Path, unit: str) -> None:
    checked = systemd_analyze("verify", "--man=no", str(installed / unit.replace("@.", "@gpu0.")))
    ours = [line for line in checked.stderr.splitlines() if "swarm" in line or str(installed) in line]
    assert checked.returncode == 0, checked.stderr
    assert ours == []


@analyze
@pytest.mark.parametrize("unit", UNITS)
def test_the_unit_is_hardened(installed: Path, unit: str) -> None:
    name = str(installed / unit.replace("@.", "@gpu0."))
    checked = systemd_analyze("security", "--offline=true", f"--threshold={EXPOSURE_MAX}", name)
    assert checked.returncode == 0, checked.stdout[-400:] + checked.stderr


@analyze
def test_systemd_refuses_what_it_does_not_know(installed: Path) -> None:
    unit = installed / "swarm-health.service"
    unit.write_text(unit.read_text().replace("ProtectSystem=strict", "ProtectSystem=very"))
    assert "very" in systemd_analyze("verify", "--man=no", str(unit)).stderr


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_keeps_its_hardening(unit: str) -> None:
    lines = (DEPLOY / unit).read_text().splitlines()
    assert [line for line in HARDENING if line not in lines] == []
    assert [line for line in lines if line.startswith("MemoryMax=")]


@pytest.mark.parametrize(("unit", "command"), UNITS.items())
def test_options_in_a_unit_exist(unit: str, command: Command) -> None:
    started = re.search(r"^ExecStart=/opt/swarm/bin/(\S+)(.*)$", (DEPLOY / unit).read_text(), re.MULTILINE)
    assert started is not None
    assert started[1] == command.name
    assert set(re.findall(r"--[a-z-]+", started[2])) <= options(command)


def options(*commands: Command) -> set[str]:
    return {name for command in commands for parameter in command.params for name in parameter.opts}


def test_settings_in_the_example_exist() -> None:
    text = (DEPLOY / "swarm.env.example").read_text()
    named = {
        f"--{name.lower().replace('_', '-')}" for name in re.findall(r"^#?SWARM_([A-Z0-9_]+)=", text, re.MULTILINE)
    }
    assert named - {"--model"} <= options(bootstrap, serve, health, gateway)
    assert "--join-address" in named


def test_a_server_has_time_to_drain() -> None:
    unit = (DEPLOY / "swarm-serve@.service").read_text()
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    (drain,) = [parameter for parameter in serve.params if "--drain-timeout" in parameter.opts]
    assert int(stop_s) >= drain.default + 20


def test_the_container_copies_what_exists_and_does_not_run_as_root() -> None:
    lines = (DEPLOY / "Containerfile").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    assert copied
    assert [name for names in copied for name in names if not (ROOT / name).exists()] == []
    assert lines.index("USER 10001:10001") < next(i for i, line in enumerate(lines) if line.startswith("CMD"))
    assert lines[-1] == f'CMD ["{bootstrap.name}"]'
