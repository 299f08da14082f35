"""A model without blocks refuses by name what it cannot do, and does right what concerns its ends alone."""

import copy

import pytest
import torch
from safetensors.torch import save_model
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from swarm.errors import UsageError

ONE = torch.randint(3, 120, (1, 12), generator=torch.Generator().manual_seed(5))
SAME = {"max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
HALF = torch.zeros(1, dtype=torch.float16)


@pytest.mark.parametrize(
    ("method", "use"),
    [
        ("save_pretrained", lambda model, folder: model.save_pretrained(folder)),
        ("push_to_hub", lambda model, _: model.push_to_hub("me/mine")),
        ("state_dict", lambda model, _: model.state_dict()),
        ("state_dict", lambda model, folder: save_model(model, str(folder / "model.safetensors"))),
        ("add_adapter", lambda model, _: model.add_adapter({})),
        ("load_adapter", lambda model, _: model.load_adapter("me/mine")),
        ("copied or pickled", lambda model, _: copy.deepcopy(model)),
        ("copied or pickled", lambda model, _: copy.copy(model)),
    ],
)
def test_saving_and_copying_are_refused_by_name(model, tmp_path, method, use):
    with pytest.raises(UsageError, match=method):
        use(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_refused_save_says_where_the_weights_are(model, checkpoint, tmp_path):
    with pytest.raises(UsageError, match=str(checkpoint)):
        model.save_pretrained(tmp_path)
    assert model.name_or_path == model.config.name_or_path == str(checkpoint)


def test_the_configs_are_saved(model, full, tmp_path):
    model.config.save_pretrained(tmp_path)
    model.generation_config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).num_hidden_layers == full.config.num_hidden_layers
    assert GenerationConfig.from_pretrained(tmp_path).to_dict() == model.generation_config.to_dict()


@pytest.mark.parametrize(
    ("dtype", "use"),
    [
        ("float16", lambda model: model.half()),
        ("bfloat16", lambda model: model.bfloat16()),
        ("float64", lambda model: model.double()),
        ("bfloat16", lambda model: model.to(torch.bfloat16)),
        ("bfloat16", lambda model: model.to("cpu", dtype=torch.bfloat16)),
        ("float16", lambda model: model.to(HALF)),
        ("float16", lambda model: model.type(torch.float16)),
    ],
)
def test_another_dtype_is_refused_and_changes_nothing(model, full, dtype, use):
    with pytest.raises(UsageError, match=rf"computes in float32.*dtype=torch\.{dtype}"):
        use(model)
    with torch.no_grad():
        assert torch.equal(model(ONE).logits.argmax(-1), full(ONE).logits.argmax(-1))


def test_the_same_dtype_and_another_device_are_accepted(model):
    assert model.float().to(torch.float32).to("cpu").cpu() is model
    assert model.to("meta").get_input_embeddings().weight.device.type == "meta"


def test_a_resized_vocabulary_computes_as_in_the_full_model(checkpoint, swarm):
    full = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with swarm.client() as model:
        for each in (model, full):
            torch.manual_seed(3)
            each.resize_token_embeddings(full.config.vocab_size + 12)
        new = ONE.clone()
        new[0, 3] = full.config.vocab_size - 1
        with torch.no_grad():
            assert (model(new).logits - full(new).logits).abs().max() < 1e-5
        assert torch.equal(model.generate(new, **SAME), full.generate(new, **SAME))


def test_a_backward_pass_through_the_blocks_is_refused(model):
    loss = model(ONE, labels=ONE).loss
    with pytest.raises(UsageError, match=r"get_input_embeddings\(\)\.requires_grad_\(False\)"):
        loss.backward()


def test_norm_and_head_alone_can_be_trained(checkpoint, swarm):
    full = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with swarm.client() as model:
        for each in (model, full):
            each.get_input_embeddings().requires_grad_(False)
            each(ONE, labels=ONE).loss.backward()
        ours, theirs = (dict(each.named_parameters()) for each in (model, full))
        trained = [name for name, weight in ours.items() if weight.grad is not None]
        assert len(trained) == 2
        for name in trained:
            assert torch.allclose(ours[name].grad, theirs[name].grad, atol=1e-5)
