"""The client's place in a swarm: its loop, its DHT node, its channels, its sessions."""
