"""A public swarm for large language models: volunteers host spans of blocks, anyone generates text through them."""

from typing import TYPE_CHECKING, Any

from swarm.version import __version__

if TYPE_CHECKING:
    from swarm.client import AutoDistributedModel, AutoDistributedModelForCausalLM

__all__ = ["AutoDistributedModel", "AutoDistributedModelForCausalLM", "__version__"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562
    """Import the client only when it is asked for: a server never needs it, and it costs a second."""
    if name in {"AutoDistributedModel", "AutoDistributedModelForCausalLM"}:
        import swarm.client  # noqa: PLC0415

        return getattr(swarm.client, name)
    raise AttributeError(f"module 'swarm' has no attribute {name!r}")
