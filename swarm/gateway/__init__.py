"""`swarm-gateway`: the swarm behind the HTTP interfaces that programs already speak."""
