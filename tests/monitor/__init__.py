"""The health page. What needs py-libp2p runs in processes of its own, and where the extra `health` is installed."""

import importlib.util

import pytest

needs_light = pytest.mark.skipif(
    importlib.util.find_spec("libp2p") is None, reason="needs pip install 'swarm-inference[health]'"
)
