"""The client side: `AutoDistributedModel` and what runs below it."""

from swarm.client.auto import AutoDistributedModel, AutoDistributedModelForCausalLM

__all__ = ["AutoDistributedModel", "AutoDistributedModelForCausalLM"]
