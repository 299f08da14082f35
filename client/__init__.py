"""The client side: `AutoDistributedModel` and what runs below it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm.client.hf.auto import AutoDistributedModel, AutoDistributedModelForCausalLM

__all__ = ["AutoDistributedModel", "AutoDistributedModelForCausalLM"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562
    """Import torch and transformers only when a model is asked for: `swarm-generate --help` needs neither."""
    if name in __all__:
        import swarm.client.hf.auto  # noqa: PLC0415

        return getattr(swarm.client.hf.auto, name)
    raise AttributeError(f"module 'swarm.client' has no attribute {name!r}")
