"""The health page: the swarm's DHT, the answers of its servers, and the success of generations through it."""
