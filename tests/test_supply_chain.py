"""What others wrote and we run: pinned by hash, and never code that arrives as data."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.client.hf.drafting import load_draft
from tests.model.rings import save_family

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)[ ]?(;[^\\]*)?", re.MULTILINE)
OURS = ("swarm", "client", "server", "dht", "benchmarks", "examples")
REMOTE_CODE = "trust_remote_code"


def pins(name: str) -> dict[str, tuple[str, str]]:
    """Each package's version and marker, as a requirements file has them."""
    found = PIN.findall((ROOT / name).read_text())
    return {package.lower().replace("_", "-"): (version, marker.strip()) for package, version, marker in found}


def test_the_lock_has_the_versions_of_the_constraints() -> None:
    tested, locked = pins("constraints.txt"), pins("constraints.lock")
    assert len(tested) > 50
    differ = {name for name, (version, _) in tested.items() if name not in locked or locked[name][0] != version}
    assert differ == set(), "run `make lock`"


def test_what_only_the_lock_has_is_for_some_platforms() -> None:
    tested, locked = pins("constraints.txt"), pins("constraints.lock")
    assert [name for name in locked.keys() - tested.keys() if not locked[name][1]] == []


def test_everything_in_the_lock_has_a_hash() -> None:
    entries = re.split(r"\n(?=\S)", (ROOT / "constraints.lock").read_text().strip())
    entries = [entry for entry in entries if not entry.startswith("#")]
    assert len(entries) == len(pins("constraints.lock"))
    assert [entry for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)] == []


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("import pickle", "TID251"),
        ("from dill import loads", "TID251"),
        ("import torch; torch.load('weights')", "TID251"),
        ("eval('1')", "S307"),
        ("exec('pass')", "S102"),
    ],
)
@pytest.mark.parametrize("where", ["client/new.py", "swarm/model/new.py"])
def test_lint_forbids_what_runs_data(line: str, code: str, where: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "json", "--stdin-filename", where, "-"]
    done = subprocess.run(command, cwd=ROOT, input=line, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert code in {found["code"] for found in json.loads(done.stdout)}


def remote_code(source: str) -> list[int]:
    """The lines that hand `trust_remote_code` on with anything but a plain False."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        named = node.arg == REMOTE_CODE if isinstance(node, ast.keyword) else False
        if named and not (isinstance(node.value, ast.Constant) and node.value.value is False):
            lines.append(node.value.lineno)
        elif isinstance(node, ast.Constant) and node.value == REMOTE_CODE:  # in a dictionary of arguments
            lines.append(node.lineno)
    return lines


def test_a_checkpoint_never_brings_code() -> None:
    files = [path for side in OURS for path in (ROOT / side).rglob("*.py")]
    assert len(files) > 60
    assert {str(path): lines for path in files if (lines := remote_code(path.read_text()))} == {}


def test_attention_that_a_drafts_config_names_is_never_fetched(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "attn_implementation": "kernels-community/flash-attn2"})
    )
    assert load_draft(tmp_path, device="cpu").config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "source", ["f(trust_remote_code=True)", "f(trust_remote_code=x)", "f(**{'trust_remote_code': 1})"]
)
def test_that_check_can_fail(source: str) -> None:
    assert remote_code(source) == [1]
    assert remote_code("f(trust_remote_code=False)") == []
