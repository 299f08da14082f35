"""Equal bits in int8 and int4, for every family: packed and alone, in chunks and whole, on one thread and on two."""

import pytest
import torch

from swarm.blocks import Blocks
from swarm.errors import UnsupportedCheckpoint
from swarm.model.checkpoint import open_checkpoint
from swarm.model.integer import is_supported
from swarm.model.loading import load_span
from tests.families import SPLIT
from tests.support.often import rest_is_long
from tests.support.steps import alone_and_packed, random, through

pytestmark = pytest.mark.skipif(not is_supported(), reason="torch has no integer kernels for this processor")

BLOCKS = Blocks(1, 5)
WINDOWS = {"cohere2", "gemma2", "gemma3_text", "gemma4_text", "mistral", "olmo3"}  # chunks add up in another order
REFUSED = {"falcon", "falcon+alibi", "gpt2", "gpt_oss", "jamba", "llama4_text"}  # few linear layers, or read past them


@pytest.mark.parametrize("name", rest_is_long(SPLIT, ()))
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_bits_depend_on_nothing_but_the_step(name, quantize, family_dir):
    checkpoint = open_checkpoint(family_dir(name))
    if name in REFUSED:
        with pytest.raises(UnsupportedCheckpoint, match="pass --quantize none"):
            load_span(checkpoint, BLOCKS, quantize=quantize)
        return
    span = load_span(checkpoint, BLOCKS, dtype=torch.float32, quantize=quantize)
    hidden = random(1, 24, span.hidden_size)
    whole, found = through(span, hidden), []
    if span.packs and not all(torch.equal(*pair) for pair in alone_and_packed(span)):
        found.append("packed")
    if span.packs and name not in WINDOWS and not torch.equal(through(span, hidden[:, :16], hidden[:, 16:]), whole):
        found.append("chunks")
    torch.set_num_threads(2)
    try:
        if not torch.equal(through(span, hidden), whole):
            found.append("threads")
    finally:
        torch.set_num_threads(1)
    assert found == []
