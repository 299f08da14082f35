"""The first blocks on the client: nobody else serves them here, and everything comes out as in the full model."""

import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm.client import AutoDistributedModel
from swarm.errors import BadConfiguration, ChecksumMismatch, NoRoute, PromptTooLong, SessionClosed, UsageError
from swarm.identity import Identity
from swarm.model.cache import SpanCache
from swarm.model.checkpoint import open_checkpoint
from swarm.model.past import SpanPast
from tests.model.rings import save_family
from tests.support.inprocess import inprocess
from tests.support.often import rest_is_long
from tests.support.swarms import eventually

IDS = torch.randint(3, 120, (3, 20), generator=torch.Generator().manual_seed(5))
SAME = {"max_new_tokens": 16, "pad_token_id": 0, "eos_token_id": None}
MODES = {
    "greedy": {},
    "beams, which gather rows": {"num_beams": 3},
    "several returned": {"do_sample": True, "num_return_sequences": 2},
    "look-up, which rolls back": {"prompt_lookup_num_tokens": 4, "rows": 1},
    "chunked prefill": {"prefill_chunk_size": 7},
    "no cache": {"use_cache": False},
}


@pytest.fixture(scope="module", params=rest_is_long(["llama", "gemma3_text", "bloom"], ["gemma3_text"]))
def world(request, tmp_path_factory):
    folder = save_family(request.param, tmp_path_factory.mktemp("local") / request.param)
    full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with inprocess(folder, "2:4", "4:6") as swarm, swarm.client(local_blocks=2) as model:
        yield swarm, model, full


def both(model, full, **arguments):
    found = []
    for each in (full, model):
        torch.manual_seed(11)
        found.append(each.generate(**SAME, **arguments, return_dict_in_generate=True, output_logits=True))
    return found


def assert_same(expected, got):
    assert torch.equal(expected.sequences, got.sequences)
    assert max(float((a - b).abs().max()) for a, b in zip(expected.logits, got.logits, strict=True)) <= 1e-5


@pytest.mark.parametrize("mode", rest_is_long(MODES, ("greedy", "look-up, which rolls back")))
def test_generates_what_the_full_model_generates(world, mode):
    _, model, full = world
    arguments = dict(MODES[mode])
    ids = torch.cat([IDS[: arguments.pop("rows", 3), :6]] * 3, dim=1)
    assert_same(*both(model, full, input_ids=ids, **arguments))


def test_a_padded_batch_generates_what_the_full_model_generates(world):
    _, model, full = world
    mask = torch.ones_like(IDS)
    mask[0, :7] = 0
    assert_same(*both(model, full, input_ids=IDS * mask, attention_mask=mask, num_beams=2))


def test_a_conversation_goes_on_after_a_rollback(world):
    _, model, full = world
    with torch.no_grad(), model.inference_session(rollback_max=8) as chat:
        model(IDS[:1])
        chat.cache.crop(-6)
        got = model(IDS[1:2, :5], past_key_values=chat.cache).logits
        expected = full(torch.cat([IDS[:1, :14], IDS[1:2, :5]], dim=1)).logits[:, 14:]
    assert (got - expected).abs().max() < 1e-5
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def test_a_batch_that_is_refused_changes_no_past_here(world):
    _, model, full = world
    cache, more = model.new_cache(), torch.tensor([[9], [9]])
    with torch.no_grad():
        model(IDS[:2, :5], past_key_values=cache)
        cache.batch_repeat_interleave(200)
        with pytest.raises(UsageError, match="a batch of 400"):
            model(more.repeat_interleave(200, 0), past_key_values=cache)
        cache.batch_select_indices(torch.tensor([0, 200]))
        got = model(more, past_key_values=cache).logits
        expected = full(torch.cat([IDS[:2, :5], more], dim=1)).logits[:, 5:]
    assert (got - expected).abs().max() < 1e-5


def test_ranges_run_here_there_or_across_the_border(world):
    _, model, _ = world
    hidden = torch.randn(2, 5, model.backend.traits.hidden_size, generator=torch.Generator().manual_seed(2))
    whole = model.blocks[0:6](hidden)
    assert torch.equal(model.blocks[2:6](model.blocks[0:2](hidden)), whole)
    assert torch.equal(model.blocks[1:6](model.blocks[0:1](hidden)), whole)


def test_the_route_begins_behind_the_local_blocks(world):
    swarm, model, _ = world
    model.generate(IDS[:1], max_new_tokens=2, pad_token_id=0)
    assert [str(hop.blocks) for hop in model.route] == ["2:4", "4:6"]
    with swarm.client() as remote, pytest.raises(NoRoute, match="0:2"):
        remote.generate(IDS[:1], max_new_tokens=2, pad_token_id=0)


def test_a_session_refuses_to_outgrow_its_limit_and_goes_on(world):
    _, model, full = world
    cache = model.new_cache(max_length=10)
    with torch.no_grad():
        model(IDS[:, :8], past_key_values=cache)
        with pytest.raises(PromptTooLong, match="10"):
            model(IDS[:, 8:12], past_key_values=cache)
        got = model(IDS[:, 8:10], past_key_values=cache).logits
        expected = full(IDS[:, :10]).logits[:, 8:]
    assert (got - expected).abs().max() < 1e-5


def test_an_interrupted_conversation_takes_no_steps_until_reset(world, monkeypatch):
    swarm, model, full = world
    advance = SpanCache.advance

    def interrupted(cache, tokens):
        if threading.current_thread() is threading.main_thread():  # not a server's: keys and values are in the layers
            raise KeyboardInterrupt
        advance(cache, tokens)

    with torch.no_grad(), model.inference_session() as chat:
        model(IDS[:, :8])
        with monkeypatch.context() as patch:
            patch.setattr(SpanCache, "advance", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(IDS[:, 8:10])
        with pytest.raises(SessionClosed, match="interrupted; open a new one"):
            model(IDS[:, 8:10])
        eventually(lambda: not any(server.handler.sessions for server in swarm.servers), within_s=5)
        chat.cache.reset()
        got = model(IDS[:, :10]).logits
        expected = full(IDS[:, :10]).logits
    assert (got - expected).abs().max() < 1e-5


def test_a_conversation_goes_on_behind_what_a_prompt_shares_with_it(world):
    _, model, full = world
    edited = torch.cat([IDS[:1], IDS[1:2]], dim=1)
    edited[0, 3] = 119 - edited[0, 3]
    with torch.no_grad(), model.inference_session(rollback_max=128) as chat:
        for prompt in (IDS[:1], IDS[:1], edited, edited[:, :30], edited[:, :9], edited):
            got = model.generate(prompt, **SAME)
            assert torch.equal(got, full.generate(prompt, **SAME))
            assert chat.length == got.shape[1] - 1
        model(IDS[2:3, :4])
        longer = torch.cat([got[:, :-1], IDS[2:3, :4], IDS[:1, :2]], dim=1)
        assert torch.equal(model.generate(longer, **SAME), full.generate(longer, **SAME))


def test_forwards_beside_a_generation_are_no_part_of_the_conversation(world):
    _, model, full = world
    with torch.no_grad(), model.inference_session(rollback_max=128) as chat:
        guided = {"guidance_scale": 1.5, **SAME}
        got = model.generate(IDS[:1], **guided)
        assert torch.equal(got, full.generate(IDS[:1], **guided))
        assert chat.length == got.shape[1] - 1


def test_a_past_that_cannot_be_taken_back_is_not_gone_on_with(world):
    _, model, full = world
    other = IDS[:1].clone()
    other[0, 3] = 119 - other[0, 3]
    with torch.no_grad(), model.inference_session() as chat:
        got = model.generate(IDS[:1], **SAME)
        if "sliding" in chat.cache._traits.kinds:
            with pytest.raises(UsageError, match=r"goes on behind 3 of them.*rollback_max"):
                model.generate(other, **SAME)
            longer = torch.cat([got, IDS[1:2]], dim=1)
            assert torch.equal(model.generate(longer, **SAME), full.generate(longer, **SAME))
        else:
            assert torch.equal(model.generate(other, **SAME), full.generate(other, **SAME))


def test_an_emptied_cache_takes_other_rows_than_it_had(world):
    _, model, full = world
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[0, :4] = 0
    with torch.no_grad():
        cache = model.new_cache(rollback_max=128)
        model(IDS, attention_mask=mask, past_key_values=cache)
        cache.reset()
        got = model(IDS[:2], attention_mask=torch.ones(2, 20, dtype=torch.long), past_key_values=cache).logits
        assert (got - full(IDS[:2]).logits).abs().max() < 1e-5


def test_threads_that_generate_at_once_do_not_mix(world, monkeypatch):
    _, model, full = world
    forward, inside, most = SpanPast.forward, [], []

    def watched(past, span, *arguments):
        if span.blocks.start:
            return forward(past, span, *arguments)  # a server's
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.002)
        try:
            return forward(past, span, *arguments)
        finally:
            inside.pop()

    monkeypatch.setattr(SpanPast, "forward", watched)
    expected = [full.generate(IDS[i : i + 1], **SAME) for i in range(3)]
    got = {}
    threads = [
        threading.Thread(target=lambda i=i: got.__setitem__(i, model.generate(IDS[i : i + 1], **SAME)))
        for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[i], expected[i]) for i in range(3))
    assert max(most) == 1  # a span is not re-entrant


@pytest.mark.long
def test_a_hop_that_dies_is_replaced_behind_the_local_blocks(tmp_path):
    folder = save_family("llama", tmp_path / "llama")
    full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with inprocess(folder, "2:6") as swarm, swarm.client(local_blocks=2) as model:
        cache = model.new_cache()
        with torch.no_grad():
            model(IDS, past_key_values=cache)
            swarm.serve("2:6")
            swarm.loop.run(swarm.servers.pop(0).stop())
            got = model(IDS[:, :4], past_key_values=cache).logits
            expected = full(torch.cat([IDS, IDS[:, :4]], dim=1)).logits[:, 20:]
    assert (got - expected).abs().max() < 1e-5


NOWHERE = [f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"]


def test_the_local_blocks_weights_are_verified(tmp_path):
    folder = save_family("llama", tmp_path / "llama")
    checkpoint = open_checkpoint(folder)
    checkpoint.manifest.save(folder)
    first = {file for name, file in checkpoint.index.weight_map.items() if "layers.0." in name}
    ends = {file for name, file in checkpoint.index.weight_map.items() if "layers." not in name}
    damaged = folder / min(first - ends)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(ChecksumMismatch, match=damaged.name):
        AutoDistributedModel.from_pretrained(folder, initial_peers=NOWHERE, local_blocks=1)


@pytest.mark.parametrize("count", [-1, 6])
def test_the_swarm_is_left_with_some_blocks(checkpoint, count):
    with pytest.raises(BadConfiguration, match="local_blocks"):
        AutoDistributedModel.from_pretrained(checkpoint, initial_peers=NOWHERE, local_blocks=count)
