"""Embeddings and head in int8: the numbers of the rounded weights, and half of the memory."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from swarm.client.hf.head import HeadedModel, prepare_head
from swarm.client.hf.rounded import RoundedEmbedding
from swarm.errors import BadConfiguration
from swarm.model.checkpoint import open_checkpoint
from swarm.model.eightbits import is_supported, rounded
from swarm.model.integer import IntegerLinear
from swarm.model.loading import load_ends
from tests.client.test_head import IDS, generated
from tests.families import make
from tests.model.rings import save_family, save_model

pytestmark = pytest.mark.skipif(not is_supported(), reason="torch has no int8 products on this processor")


def ends_of(folder, dtype=torch.float32):
    checkpoint = open_checkpoint(folder)
    ends = load_ends(checkpoint, dtype=dtype)
    prepare_head(ends, checkpoint.traits, "int8")
    return ends


def dequantised(weight):
    integers, scales = rounded(weight)
    return integers.float() * scales[:, None]


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.long)], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    config = make("llama")
    config.tie_word_embeddings = request.param
    return save_model(config, tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_and_head_compute_with_the_rounded_weights(folder, dtype):
    ends, stock = ends_of(folder, dtype), AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        embedded = nn.functional.embedding(IDS, dequantised(stock.get_input_embeddings().weight)).to(dtype)
        assert torch.equal(ends.get_input_embeddings()(IDS), embedded)
        hidden = torch.randn(1, 5, ends.config.hidden_size, generator=torch.Generator().manual_seed(3)).to(dtype)
        logits = nn.functional.linear(hidden.double(), dequantised(stock.get_output_embeddings().weight).double())
        found = ends.get_output_embeddings()(hidden)
    assert found.dtype is dtype
    assert float((found.double() - logits).norm() / logits.norm()) < (3e-4 if dtype is torch.float32 else 4e-3)


def test_the_weights_as_they_were_take_no_memory(folder):
    ends = ends_of(folder)
    for module, kind in (
        (ends.get_input_embeddings(), RoundedEmbedding),
        (ends.get_output_embeddings(), IntegerLinear),
    ):
        assert type(module) is kind
        assert module.weight.untyped_storage().nbytes() == module.weight.element_size()
    vocabulary, width = ends.get_input_embeddings().weight.shape
    is_tied = ends.config.tie_word_embeddings
    assert ends._facts.n_bytes == vocabulary * (width + 4)
    assert ends._facts.embedding_bytes == (0 if is_tied else vocabulary * (width + 4))
    assert "embeddings" in str(ends._facts)


def test_a_head_that_cannot_be_rounded_is_refused(tmp_path, monkeypatch):
    folder = save_family("llama", tmp_path)
    monkeypatch.setattr("swarm.client.hf.rounded.is_supported", lambda: False)
    with pytest.raises(BadConfiguration, match="x86"):
        ends_of(folder)


def test_a_family_that_goes_around_its_head_is_refused(tmp_path, monkeypatch):
    folder = save_family("llama", tmp_path)
    monkeypatch.setattr(IntegerLinear, "forward", lambda self, input: nn.functional.linear(input, self.weight))
    with pytest.raises(BadConfiguration, match="way of its own"):
        ends_of(folder)


@pytest.mark.long
def test_a_swarm_generates_what_a_model_with_rounded_weights_does(swarm, checkpoint):
    stock = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        for module in {stock.get_input_embeddings(), stock.get_output_embeddings()}:
            module.weight.copy_(dequantised(module.weight))
    with swarm.client(head="int8") as model:
        assert isinstance(model, HeadedModel)
        assert generated(model, do_sample=False)[0] == generated(stock, do_sample=False)[0]
        assert model.head_facts.embedding_bytes is not None
