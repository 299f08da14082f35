"""The example notebook runs as it stands, against a swarm on this machine."""

from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.swarms import REPOSITORY, World, environment

NOTEBOOK = REPOSITORY / "examples" / "generate.ipynb"
CELL_TIMEOUT_S = 120


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # a kernel and its messages bring warnings of their own
def test_the_example_notebook_runs(demo: World, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    variables = environment(home) | {
        "SWARM_MODEL": str(demo.directory),
        "SWARM_INITIAL_PEERS": ",".join(demo.swarm.initial_peers),
        "SWARM_NETWORK": demo.swarm.network,
        "IPYTHONDIR": str(tmp_path),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    with TemporaryDirectory() as folder:  # short: a socket's path has 107 bytes
        client = NotebookClient(
            notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
        )
        kernel = client.create_kernel_manager()
        kernel.transport, kernel.ip = "ipc", f"{folder}/kernel"  # takes no ports, which another test might want
        client.execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "def read_lines(path):" in printed
    for server in demo.swarm.servers:
        assert f"blocks {server.ready['blocks']}" in printed
        assert server.ready["peer_id"] in printed
    assert "positions are kept on the servers" in printed
    assert "[debug" not in printed
    assert "[info" not in printed
    assert '"event"' not in printed  # our own events are for servers' logs
