"""Distilling a draft head from a model whose blocks are in a swarm: `swarm-draft`. Only forwards go through it."""
