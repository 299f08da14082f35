"""Many nodes, some of which die together. A host process runs several nodes, each with its own p2pd."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psutil
import pytest

from swarm.dht.directory import Directory
from swarm.identity import Identity
from tests.dht.support import NETWORK, ROOT, announcement, is_running, node, soon
from tests.support.often import rest_is_long


async def announcing_node(stack: AsyncExitStack, folder: Path, name: str, peers: tuple[str, ...]) -> Directory:
    identity = Identity.generate()
    joined = await stack.enter_async_context(node(folder, name, peers, identity=identity))
    directory = Directory(joined, identity=identity, network=NETWORK, clock=time.time)
    await directory.announce(announcement(identity))
    return directory


async def host(folder: Path, n_nodes: int, peers: tuple[str, ...]) -> None:
    """Run nodes that announce themselves, until killed."""
    async with AsyncExitStack() as stack:
        for i in range(n_nodes):
            await announcing_node(stack, folder, f"host-{i}", peers)
        print("ready", flush=True)
        await asyncio.sleep(300)


@asynccontextmanager
async def other_process(
    folder: Path, n_nodes: int, peers: tuple[str, ...]
) -> AsyncIterator[asyncio.subprocess.Process]:
    arguments = json.dumps([str(folder), n_nodes, peers])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.dht.test_swarm", arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            while b"ready" not in await process.stdout.readline():
                assert process.returncode is None
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.long
@pytest.mark.slow("another process with nodes of its own, each with its p2pd")
@pytest.mark.parametrize(("n_nodes", "n_killed"), rest_is_long([(10, 4), (20, 8)], [(10, 4)]))
async def test_every_record_is_found_within_one_refresh_of_kill_9(tmp_path: Path, n_nodes: int, n_killed: int) -> None:
    async with AsyncExitStack() as stack:
        boot = await stack.enter_async_context(node(tmp_path, "boot"))
        ours = [await announcing_node(stack, tmp_path, f"{i}", boot.addresses) for i in range(n_nodes - n_killed - 1)]
        async with other_process(tmp_path, n_killed, boot.addresses) as doomed:
            reader = Directory(boot, identity=None, network=NETWORK, clock=time.time)
            assert len(await reader.servers(ROOT, 12)) == n_nodes - 1
            daemons = [child.pid for child in psutil.Process(doomed.pid).children(recursive=True)]
            assert len(daemons) == n_killed
            doomed.kill()
            await doomed.wait()
        with soon(20):  # one refresh
            survivors = {directory._identity.public_key.hex() for directory in ours if directory._identity}
            client = await stack.enter_async_context(node(tmp_path, "client", boot.addresses, client=True))
            fresh = Directory(client, identity=None, network=NETWORK, clock=time.time)
            async with asyncio.TaskGroup() as group:
                for directory in ours:
                    identity = directory._identity
                    assert identity is not None
                    group.create_task(directory.announce(announcement(identity)))
            found = {signed.announcement.public_key for signed in await fresh.servers(ROOT, 12)}
            assert survivors <= found
        assert not any(is_running(pid) for pid in daemons)


if __name__ == "__main__":
    _folder, _n_nodes, _peers = json.loads(sys.argv[1])
    asyncio.run(host(Path(_folder), _n_nodes, tuple(_peers)))
