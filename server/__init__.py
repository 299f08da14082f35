"""The server side: `swarm-serve`."""
