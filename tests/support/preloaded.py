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
# They compile hundreds of regular expressions for the first model that they load.
import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
