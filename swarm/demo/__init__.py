"""A whole swarm in one process tree, with its small checkpoint."""
