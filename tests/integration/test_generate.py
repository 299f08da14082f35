"""Stock `generate()` over three servers gives what the full local model gives, in every mode.

In `make test` llama's servers are processes and go through all modes; those of other families are in this process and
go through three. `make test-long` has the whole product, over processes.
"""

import copy
import functools
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from swarm.client.session.limits import ChunkLimits, SessionLimits
from tests.support.inprocess import inprocess
from tests.support.often import rest_is_long
from tests.support.swarms import DEMO_CHECKPOINT, DEMO_SPANS, SPANS, World, prompt, world

FAMILIES = ("llama", "gemma3_text", "qwen3_moe", "deepseek_v3", "gpt_oss", "bloom", "demo")
# float32, of logits up to 30. 0.0 where a BLAS sums alike; servers pick kernels by measuring: others sum otherwise, up
# to 3.2e-5 on one machine. The local model in float32 is 2.2e-5 away from float64 itself: two orders differ more.
LOGITS_TOLERANCE = 5e-5
BFLOAT16_TOLERANCE = 0.05  # 0.0 where measured; bfloat16 itself is 0.19 away from float32 on these tokens
SAME = {"max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": None}
ONE = torch.cat([prompt(1, 9)] * 3, dim=1)[:, :21]  # repeats itself, so that prompt look-up finds something
THREE = prompt(3, 14)

# What a mode passes to generate(); "ids" replaces the prompt, "assistant_model" is filled in by the test.
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "batch": {"ids": THREE},
    "sampling": {"do_sample": True, "temperature": 0.9, "top_p": 0.9, "top_k": 20},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "beam search": {"num_beams": 4},
    "beam search of a batch, several returned": {"ids": THREE, "num_beams": 4, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "several returned": {"do_sample": True, "num_return_sequences": 3},
    "assisted": {"assistant_model": None},
    "assisted sampling": {"assistant_model": None, "do_sample": True},
    "prompt look-up": {"prompt_lookup_num_tokens": 4},
    "chunked prefill": {"prefill_chunk_size": 5},
    "no cache": {"use_cache": False},
    "stopping criteria": {
        "stopping_criteria": [lambda ids, scores, **_: torch.full((ids.shape[0],), ids.shape[1] >= 30)]
    },
}
# `make test` runs one of each kind: plain, drawn, in beams, with a draft, in chunks.
OFTEN = ("greedy", "sampling", "beam search of a batch, several returned", "assisted", "chunked prefill")
OF_FAMILIES = ("beam search of a batch, several returned", "assisted sampling", "chunked prefill")


@pytest.fixture(scope="module", params=rest_is_long(FAMILIES, ["llama"]))
def running(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], home: Path) -> Iterator[World]:
    if request.param == "llama":
        yield request.getfixturevalue("llama")
        return
    if request.param == "demo":
        starting = world(DEMO_CHECKPOINT, home, DEMO_SPANS)
    else:
        starting = world(checkpoint(request.param), home)
    with starting as started:
        yield started


@pytest.fixture(scope="module")
def client(running: World) -> PreTrainedModel:
    return running.client()


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("mode", rest_is_long(MODES, OFTEN))
def test_generates_what_the_full_model_generates(running: World, client: PreTrainedModel, mode: str):
    assert_generates_the_same(running.full, client, mode)


@pytest.mark.long
@pytest.mark.parametrize("family", rest_is_long(FAMILIES[1:], ["demo", "deepseek_v3"]))
def test_a_family_gathers_rolls_back_and_prefills_in_chunks(family: str, checkpoint: Callable[[str], Path]):
    directory = DEMO_CHECKPOINT if family == "demo" else checkpoint(family)
    full = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with inprocess(directory, *(DEMO_SPANS if family == "demo" else SPANS)) as swarm, swarm.client() as model:
        for mode in OF_FAMILIES:
            assert_generates_the_same(full, model, mode)


def assert_generates_the_same(full: PreTrainedModel, distributed: PreTrainedModel, mode: str):
    arguments = dict(MODES[mode])
    ids = arguments.pop("ids", ONE)

    def run(model: PreTrainedModel):
        given = dict(arguments)
        if "assistant_model" in given:  # the tokens are those of a plain call, with sampling, too
            del given["assistant_model"]
            given |= {} if model is full else {"assistant_model": noised(full)}
        torch.manual_seed(7)
        return model.generate(ids, **SAME, **given, return_dict_in_generate=True, output_logits=True)

    expected, got = run(full), run(distributed)
    assert torch.equal(expected.sequences, got.sequences), mode
    assert expected.sequences.shape[1] > ids.shape[1]
    assert len(expected.logits) == len(got.logits)
    assert difference(expected.logits, got.logits) <= LOGITS_TOLERANCE, mode


@pytest.mark.long
def test_a_left_padded_batch_generates_what_the_full_model_generates(running: World, client: PreTrainedModel):
    mask = torch.ones_like(THREE)
    mask[0, :5] = 0
    mask[1, :1] = 0
    ids = THREE * mask
    unpadded = torch.ones_like(mask)

    def run(model: PreTrainedModel, mask: Tensor, **mode: Any):
        return model.generate(
            ids, attention_mask=mask, **SAME, **mode, return_dict_in_generate=True, output_logits=True
        )

    for mode in ({}, {"num_beams": 2}):
        expected, got = run(running.full, mask, **mode), run(client, mask, **mode)
        assert torch.equal(expected.sequences, got.sequences)
        assert difference(expected.logits, got.logits) <= LOGITS_TOLERANCE
        assert difference(expected.logits, run(running.full, unpadded, **mode).logits) > 100 * LOGITS_TOLERANCE


def test_a_streamer_sees_every_token_as_it_comes(client: PreTrainedModel):
    class Collector:
        def __init__(self):
            self.pieces, self.ended = [], False

        def put(self, value: Tensor):
            self.pieces.append(value.flatten().tolist())

        def end(self):
            self.ended = True

    streamer = Collector()
    got = client.generate(ONE, streamer=streamer, **SAME)
    assert functools.reduce(operator.iadd, streamer.pieces, []) == got[0].tolist()
    assert len(streamer.pieces) == 1 + SAME["max_new_tokens"]
    assert streamer.ended


def test_a_chat_continues_with_the_cache_of_the_turn_before(running: World, client: PreTrainedModel):
    def chat(model: PreTrainedModel, cache: object) -> Tensor:
        first = model.generate(ONE, past_key_values=cache, **SAME)
        return model.generate(torch.cat([first, THREE[:1]], dim=1), past_key_values=cache, **SAME)

    expected = chat(running.full, DynamicCache(config=running.full.config))
    assert torch.equal(expected, chat(client, client.new_cache()))


@pytest.mark.long
def test_a_returned_cache_continues_the_chat(running: World, client: PreTrainedModel):
    def chat(model: PreTrainedModel) -> Tensor:
        first = model.generate(ONE, return_dict_in_generate=True, **SAME)
        longer = torch.cat([first.sequences, THREE[:1]], dim=1)
        return model.generate(longer, past_key_values=first.past_key_values, **SAME)

    assert torch.equal(chat(running.full), chat(client))


def test_an_inference_session_keeps_the_chat_on_the_servers(running: World, client: PreTrainedModel):
    text = ONE
    with client.inference_session(max_length=200) as session:
        for turn in range(3):
            before = session.length
            got = client.generate(text, **SAME)
            assert torch.equal(running.full.generate(text, **SAME), got)
            assert session.length == got.shape[1] - 1  # the last token has not been through the blocks
            assert turn == 0 or before > ONE.shape[1]
            text = torch.cat([got, prompt(1, 4, seed=turn)], dim=1)


def test_a_hand_written_loop_over_past_key_values_gives_the_same_logits(running: World, client: PreTrainedModel):
    def loop(model: PreTrainedModel) -> list[Tensor]:
        logits, cache, ids = [], None, ONE
        for _ in range(12):
            out = model(ids, past_key_values=cache)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            logits.append(out.logits)
        return logits

    assert difference(loop(running.full), loop(client)) <= LOGITS_TOLERANCE


def test_one_forward_gives_the_full_models_logits(running: World, client: PreTrainedModel):
    for ids in (ONE, THREE):
        assert difference([running.full(ids).logits], [client(ids).logits]) <= LOGITS_TOLERANCE
        without = client(ids, use_cache=False)
        assert difference([running.full(ids, use_cache=False).logits], [without.logits]) <= LOGITS_TOLERANCE
        assert without.get("past_key_values") is None


@pytest.mark.long
def test_a_prefill_in_many_messages_that_overlap_gives_the_full_models_logits(running: World):
    """The full model takes the same pieces, one after the other: a router's near-ties must fall the same way."""
    tokens, piece, tail = 100, 7, prompt(3, 20, seed=2)
    chunks = ChunkLimits(chunk_bytes=3 * running.full.config.hidden_size * 4 * piece)
    client = running.client(limits=SessionLimits(chunks=chunks))
    ids = prompt(3, tokens)  # more pieces than may be under way at once, and longer than any sliding window
    mask = torch.ones(3, tokens + tail.shape[1], dtype=torch.int64)
    padded = mask.clone()
    padded[0, :9] = 0
    for columns in (mask, padded):
        expected, cache = [], None
        for start, stop in pieces(tokens, piece):
            out = running.full(ids[:, start:stop], attention_mask=columns[:, :stop], past_key_values=cache)
            expected.append(out.logits)
            cache = out.past_key_values
        for start, stop in pieces(tail.shape[1], piece):
            out = running.full(tail[:, start:stop], attention_mask=columns[:, : tokens + stop], past_key_values=cache)
            expected.append(out.logits)
        first = client(ids, attention_mask=columns[:, :tokens])
        second = client(tail, attention_mask=columns, past_key_values=first.past_key_values)
        both, real = torch.cat([first.logits, second.logits], dim=1), columns.bool()
        assert difference([torch.cat(expected, dim=1)[real]], [both[real]]) <= LOGITS_TOLERANCE


def pieces(tokens: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def test_the_route_has_the_three_servers_in_order(running: World, client: PreTrainedModel):
    client.generate(ONE, **SAME)
    assert [str(hop.blocks) for hop in client.route] == [server.ready["blocks"] for server in running.swarm.servers]
    assert [hop.peer_id for hop in client.route] == [server.ready["peer_id"] for server in running.swarm.servers]


@pytest.mark.long
def test_in_bfloat16_the_logits_stay_within_a_bound():
    """Teacher-forced on the same tokens, so that a near-tie that falls the other way changes nothing after it."""
    full = AutoModelForCausalLM.from_pretrained(DEMO_CHECKPOINT, dtype=torch.bfloat16).eval()
    exact = AutoModelForCausalLM.from_pretrained(DEMO_CHECKPOINT, dtype=torch.float32).eval()

    def decoded(model: PreTrainedModel) -> list[Tensor]:
        out, logits = model(ONE), []
        for position in range(ONE.shape[1], ids.shape[1]):
            logits.append(out.logits[:, -1].float())
            out = model(ids[:, position : position + 1], past_key_values=out.past_key_values)
        return logits

    with inprocess(DEMO_CHECKPOINT, *DEMO_SPANS, dtype=torch.bfloat16) as swarm, swarm.client() as client:
        ids = full.generate(ONE, **SAME)
        in_one = [full(ids).logits.float()]
        assert difference(in_one, [client(ids).logits.float()]) <= BFLOAT16_TOLERANCE
        assert difference(in_one, [exact(ids).logits]) > 2 * BFLOAT16_TOLERANCE
        assert difference(decoded(full), decoded(client)) <= BFLOAT16_TOLERANCE


def noised(full: PreTrainedModel) -> PreTrainedModel:
    """A draft that is often right: the model itself with some noise."""
    draft = copy.deepcopy(full)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * parameter.abs().mean() * 0.05)
    return draft


def difference(left: list[Tensor], right: list[Tensor]) -> float:
    """The largest absolute difference."""
    assert [x.shape for x in left] == [x.shape for x in right]
    assert left
    return max(float((x - y).abs().max()) for x, y in zip(left, right, strict=True))
