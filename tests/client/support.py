"""What tests of sessions over real sockets share."""

import time

import torch

IDS = torch.randint(3, 120, (2, 50), generator=torch.Generator().manual_seed(3))


def eventually(condition, within_s=5.0):
    """Wait until a condition holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.01)


def crash(swarm, server):
    """What clients and neighbours see of a process that is killed; its record stays until it expires."""

    async def vanish():
        await server.listener.close()
        await server.handler.links.dialer.close()

    swarm.loop.run(vanish())


def used_twins(swarm, model):
    """The servers that the model's route runs through, in order."""
    by_peer = {server.me.identity.peer_id: server for server in swarm.servers}
    return [by_peer[hop.peer_id] for hop in model.route]
