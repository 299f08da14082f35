"""What servers and bootstrap nodes import, for the process that tests fork them from."""

from importlib import import_module

for _name in (
    "transformers.models.llama.modeling_llama",  # most tests' family
    "swarm.dht.bootstrap",
    "swarm.dht.cli",
    "swarm.server.serve",
    "swarm.server.cli",
    "swarm.client.cli",
):
    import_module(_name)
