"""A client without initial peers, in a process of its own: prints its tokens, or why it has none, as JSON."""

import json
import sys
import time

import torch

from swarm import AutoDistributedModel
from swarm.errors import SwarmError


def main() -> None:
    """Generate. Arguments: model, network, network key or "", prompt (JSON), new tokens."""
    model, network, key, prompt, count = sys.argv[1:6]
    began = time.monotonic()
    try:
        with AutoDistributedModel.from_pretrained(
            model, network=network, network_key=key or None, dtype="float32"
        ) as joined:
            tokens = joined.generate(torch.tensor(json.loads(prompt)), max_new_tokens=int(count), do_sample=False)
        print(json.dumps({"tokens": tokens.tolist(), "took_s": time.monotonic() - began}))
    except SwarmError as error:
        print(json.dumps({"error": str(error), "took_s": time.monotonic() - began}))
