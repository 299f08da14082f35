"""Families that nobody named are refused for what they do, and not only for what they are called."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from swarm.blocks import Blocks
from swarm.errors import UnsupportedArchitecture
from swarm.model import traits
from swarm.model.checkpoint import open_checkpoint
from swarm.model.loading import load_span
from swarm.model.traits import traits_of
from tests.families import FAMILIES, SPLIT, make

FamilyDir = Callable[[str], Path]


@pytest.fixture
def no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no family were known."""
    monkeypatch.setattr(traits, "_refuse_by_config", lambda *_: None)


@pytest.mark.usefixtures("no_names")
def test_a_state_of_four_dimensions_is_found() -> None:
    with pytest.raises(UnsupportedArchitecture, match="hand on"):
        traits_of(make("gemma3n_text"))


@pytest.mark.usefixtures("no_names")
@pytest.mark.parametrize("model_type", ["gemma4_text", "zamba2"])
def test_a_side_channel_from_the_tokens_is_found(model_type: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match="more of the tokens"):
        traits_of(AutoConfig.for_model(model_type))


@pytest.mark.usefixtures("no_names")
def test_state_in_modules_is_found(family_dir: FamilyDir) -> None:
    checkpoint = open_checkpoint(family_dir("recurrent_gemma"))
    with pytest.raises(UnsupportedArchitecture, match="keeps state in itself"):
        load_span(checkpoint, Blocks(0, 2))


def test_sessions_that_leak_in_a_way_that_leaves_no_attribute_are_found(
    family_dir: FamilyDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = LlamaMLP.forward

    def forward(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return real(self, x) * len(calls)

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with pytest.raises(UnsupportedArchitecture, match="two sessions take turns"):
        load_span(open_checkpoint(family_dir("llama")), Blocks(0, 2))


def test_blocks_that_share_a_container_are_found(family_dir: FamilyDir, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LlamaDecoderLayer.forward
    shared: dict[str, torch.Tensor] = {}

    def forward(self: LlamaDecoderLayer, *args: object, store: object = None, **kwargs: object) -> torch.Tensor:
        if store is not None:
            store[f"keys {len(store)}"] = args[0]
        return real(self, *args, **kwargs)

    call = LlamaDecoderLayer.__call__
    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    monkeypatch.setattr(LlamaDecoderLayer, "__call__", lambda self, *a, **k: call(self, *a, store=shared, **k))
    with pytest.raises(UnsupportedArchitecture, match="leaves data for later blocks"):
        load_span(open_checkpoint(family_dir("llama")), Blocks(0, 2))


@pytest.mark.parametrize("none_shared", [True, False])
def test_keys_that_a_block_writes_for_later_ones_are_no_harm_where_none_are_shared(
    family_dir: FamilyDir, monkeypatch: pytest.MonkeyPatch, *, none_shared: bool
) -> None:
    """Gemma 4's blocks do so in transformers 5.24."""
    real, call = LlamaDecoderLayer.forward, LlamaDecoderLayer.__call__

    def forward(self: LlamaDecoderLayer, *args: object, shared_kv_states: object, **kwargs: object) -> torch.Tensor:
        shared_kv_states[len(shared_kv_states)] = args[0]
        return real(self, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    monkeypatch.setattr(
        LlamaDecoderLayer, "__call__", lambda self, *a, **k: call(self, *a, **{"shared_kv_states": {}, **k})
    )
    if none_shared:
        monkeypatch.setattr(LlamaConfig, "num_kv_shared_layers", 0, raising=False)
        load_span(open_checkpoint(family_dir("llama")), Blocks(0, 2))
        return
    with pytest.raises(UnsupportedArchitecture, match="leaves data for later blocks"):
        load_span(open_checkpoint(family_dir("llama")), Blocks(0, 2))


def test_shared_keys_and_values_are_refused_by_config() -> None:
    config = AutoConfig.for_model(
        "gemma4_text",
        **{**FAMILIES["gemma4_text+ple+kvshare"], "num_hidden_layers": 6, "hidden_size_per_layer_input": 0},
    )
    with pytest.raises(UnsupportedArchitecture, match="keys and values of earlier ones"):
        traits_of(config)


def test_rotary_tables_that_depend_on_other_sessions_are_refused() -> None:
    config = make("llama")
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedArchitecture, match="longest session"):
        traits_of(config)


@pytest.mark.parametrize("model_type", ["deepseek_v4", "bert", "t5", "xlnet"])
def test_more_families_that_cannot_be_split(model_type: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=model_type):
        traits_of(AutoConfig.for_model(model_type))


@pytest.mark.parametrize("name", SPLIT)
def test_traits_tell_what_a_client_must_know(name: str) -> None:
    found = traits_of(make(name))
    assert found.n_blocks == len(found.kinds) == 6
    assert found.hidden_size == 64
    assert found.embedding_size == (32 if name == "opt" else 64)
    assert found.cache_argument in {"cache", "cache_params" if name == "mamba2" else "past_key_values"}
    assert found.can_roll_back == ("linear" not in found.kinds)
    assert found.returns == (1 if name.startswith(("falcon", "bloom")) else 0)


@pytest.mark.parametrize("argument", ["cache", "past_key_values"])
@pytest.mark.parametrize("passed", ["cache", "cache_params", "past_key_values"])
def test_a_cache_is_found_by_any_of_its_names(argument: str, passed: str) -> None:
    found = replace(traits_of(make("llama")), cache_argument=argument)
    arguments = {"input_ids": 1, passed: 2}
    assert found.cache_in(arguments) == 2
    assert arguments == {"input_ids": 1, argument: 2}
    assert found.cache_in({"input_ids": 1}) is None
    assert found.cache_in({"past_key_values": 1, "cache": 2} if argument == "cache" else {argument: 2}) == 2


def test_a_second_state_from_block_to_block_is_found() -> None:
    """ZAYA's routers add the routing of the block before, and do without it where there is none."""
    with pytest.raises(UnsupportedArchitecture, match="more than one hidden state"):
        traits_of(AutoConfig.for_model("zaya", num_hidden_layers=4))


@pytest.mark.parametrize(("every", "is_shared"), [(1, False), (2, True)])
def test_positions_that_blocks_choose_for_later_ones_are_found(every: int, *, is_shared: bool) -> None:
    config = AutoConfig.for_model("glm_moe_dsa", num_hidden_layers=6, index_topk_freq=every)
    if is_shared:
        with pytest.raises(UnsupportedArchitecture, match="more than one hidden state"):
            traits_of(config)
    else:
        assert traits_of(config).returns == 2


def test_a_block_that_does_not_run_is_refused_by_its_family(
    family_dir: FamilyDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_: object) -> torch.Tensor:
        raise ValueError("indices of an earlier block are needed")

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with pytest.raises(UnsupportedArchitecture, match="does not run alone: indices of an earlier block"):
        load_span(open_checkpoint(family_dir("llama")), Blocks(0, 2))


def test_longrope_ends_where_its_outputs_would_depend_on_how_a_prompt_is_cut() -> None:
    config = make("phi3")
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config.rope_parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, **factors}
    config.original_max_position_embeddings, config.max_position_embeddings = 20, 80
    assert traits_of(config).positions_max == 20
