"""What servers and bootstrap nodes import, for the process that tests fork them from."""

from importlib import import_module

from swarm.server.lean import leave_out_what_no_server_needs

leave_out_what_no_server_needs()
for _name in (
    "transformers.models.llama.modeling_llama",  # most tests' family
    "swarm.dht.bootstrap",
    "swarm.dht.cli",
    "swarm.server.serve",
    "swarm.server.cli",
    "swarm.client.cli",
):
    import_module(_name)
