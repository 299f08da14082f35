"""Equal bits in int8 and int4, for every family: packed and alone, in chunks and whole, on one thread and on two."""

import pytest
import torch

from swarm.blocks import Blocks
from swarm.errors import UnsupportedCheckpoint
from swarm.model.checkpoint import open_checkpoint
from swarm.model.eightbits import is_supported
from swarm.model.loading import load_span
from tests.families import SPLIT
from tests.support.often import rest_is_long
from tests.support.steps import alone_and_packed, cuts_that_show, random, through

pytestmark = pytest.mark.skipif(not is_supported(), reason="torch has no integer kernels for this processor")

BLOCKS = Blocks(1, 5)
# torch's sigmoid has other last bits where a vector is not full: gates of one number, and tiny models' few experts.
SIGMOIDS = {"qwen2_moe", "glm4_moe", "minimax_m2"}
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
    if span.packs and name not in SIGMOIDS and cuts_that_show(span):
        found.append("chunks")
    torch.set_num_threads(2)
    try:
        if not torch.equal(through(span, hidden), whole):
            found.append("threads")
    finally:
        torch.set_num_threads(1)
    assert found == []
