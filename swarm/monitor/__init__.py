"""The health page: what the swarm's DHT says, what its servers answer, and how generations through it fare."""
