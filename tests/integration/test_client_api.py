"""A distributed model in a person's hands: interrupted, collected, misused, inside a running event loop."""

import asyncio
import gc
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from swarm import AutoDistributedModel, AutoDistributedModelForCausalLM
from swarm.demo.local import LocalProcess
from swarm.errors import BadBlocks, PromptTooLong, SessionClosed, UsageError
from tests.support.swarms import World, eventually, prompt

SAME = {"pad_token_id": 0, "eos_token_id": None}
FREED_WITHIN_S = 1.0
EXACT = 5e-5  # float32, of numbers up to 30: a prompt that comes while somebody else decodes is computed in pieces


@pytest.fixture(scope="module")
def client(llama: World) -> PreTrainedModel:
    return llama.client()


@pytest.fixture
def leases(llama: World) -> Iterator[Callable[[], set[tuple[str, str]]]]:
    """The sessions that were opened on the servers since the test began and have not ended."""
    before = set().union(*map(open_sessions, llama.swarm.servers))

    def get() -> set[tuple[str, str]]:
        return set().union(*map(open_sessions, llama.swarm.servers)) - before

    yield get
    gc.collect()
    eventually(lambda: not get(), within_s=5)


def open_sessions(server: LocalProcess) -> set[tuple[str, str]]:
    """(server, session) of what a server's log says was opened and not ended."""
    sessions: set[tuple[str, str]] = set()
    for line in server.log.read_text().splitlines():
        event = json.loads(line) if line.startswith("{") and line.endswith("}") else {}
        if event.get("event") == "session opened":
            sessions.add((server.name, event["session"]))
        if event.get("event") == "session ended":
            sessions.discard((server.name, event["session"]))
    return sessions


@pytest.mark.long
async def test_works_where_an_event_loop_runs_in_the_main_thread(llama: World):
    assert asyncio.get_running_loop().is_running()
    with AutoDistributedModel.from_pretrained(
        llama.directory, initial_peers=llama.swarm.initial_peers, network=llama.swarm.network
    ) as model:
        got = model.generate(prompt(1, 6), max_new_tokens=5, **SAME)
        assert torch.equal(got, llama.full.generate(prompt(1, 6), max_new_tokens=5, **SAME))


def test_has_a_second_name():
    assert AutoDistributedModelForCausalLM is AutoDistributedModel


def test_is_a_model_of_the_familys_own_class(llama: World, client: PreTrainedModel):
    assert isinstance(client, type(llama.full))
    assert type(client).__name__ == type(llama.full).__name__


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Let SIGINT interrupt, also where a shell began the run in the background and made it be ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupter:
    """A streamer that lets another thread press Ctrl-C after some tokens."""

    def __init__(self, after: int):
        self.left = after

    def put(self, value: Tensor):
        self.left -= 1
        if self.left == 0:
            threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT)).start()

    def end(self):
        pass


# An interrupt that arrives in a finalizer is lost there, and Python says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_stops_the_generation_and_frees_its_leases(
    client: PreTrainedModel, leases: Callable[[], set[tuple[str, str]]]
):
    client.generate(prompt(1, 6), max_new_tokens=2, **SAME)
    streamer = Interrupter(after=5)
    with pytest.raises(KeyboardInterrupt) as interrupted:
        client.generate(prompt(1, 6), max_new_tokens=240, streamer=streamer, **SAME)
    assert -200 < streamer.left <= 0
    eventually(lambda: not leases(), within_s=FREED_WITHIN_S)
    del interrupted  # held until here: a notebook keeps the traceback too, and every frame's cache with it
    client.generate(prompt(1, 6), max_new_tokens=2, **SAME)  # the model is as good as before


# An interrupt that arrives in a finalizer is lost there, and Python says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("interrupts")
def test_an_interrupted_loop_goes_on_with_a_fresh_cache(
    llama: World, client: PreTrainedModel, leases: Callable[[], set[tuple[str, str]]]
):
    out = client(prompt(1, 6))
    assert len(leases()) == 3
    interrupted = threading.Event()

    def interrupt():
        while not interrupted.wait(0.2):  # Python forgets one that arrives while an object's end is told
            os.kill(os.getpid(), signal.SIGINT)

    def for_ever():
        try:
            while True:
                client(prompt(1, 6))
        finally:
            interrupted.set()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        for_ever()
    del out
    gc.collect()
    eventually(lambda: not leases(), within_s=FREED_WITHIN_S)
    assert difference(client(prompt(1, 6)).logits, llama.full(prompt(1, 6)).logits) <= EXACT


def test_a_collected_cache_frees_its_leases(client: PreTrainedModel, leases: Callable[[], set[tuple[str, str]]]):
    out = client(prompt(1, 6))
    assert len(leases()) == 3
    del out
    gc.collect()
    eventually(lambda: not leases(), within_s=FREED_WITHIN_S)


def test_generate_frees_its_leases_when_it_returns(client: PreTrainedModel, leases: Callable[[], set[tuple[str, str]]]):
    out = client.generate(prompt(1, 6), max_new_tokens=3, **SAME)
    eventually(lambda: not leases(), within_s=FREED_WITHIN_S)
    out = client.generate(prompt(1, 6), max_new_tokens=3, return_dict_in_generate=True, **SAME)
    assert len(leases()) == 3  # the returned cache can be used
    del out
    gc.collect()
    eventually(lambda: not leases(), within_s=FREED_WITHIN_S)


def test_an_inference_session_frees_its_leases_at_its_end(
    client: PreTrainedModel, leases: Callable[[], set[tuple[str, str]]]
):
    with client.inference_session(max_length=40):
        client.generate(prompt(1, 6), max_new_tokens=3, **SAME)
        assert len(leases()) == 3
    eventually(lambda: not leases(), within_s=FREED_WITHIN_S)


def test_the_route_shows_peer_blocks_and_latency(llama: World, client: PreTrainedModel):
    client.generate(prompt(1, 6), max_new_tokens=2, **SAME)
    assert [hop.peer_id for hop in client.route] == [server.ready["peer_id"] for server in llama.swarm.servers]
    assert [(hop.blocks.start, hop.blocks.stop) for hop in client.route] == [(0, 1), (1, 4), (4, 6)]
    assert all(0 < hop.latency_ms < 1000 for hop in client.route)
    assert all(hop.peer_id in str(hop) for hop in client.route)


def test_a_range_of_blocks_is_a_function_of_hidden_states(llama: World, client: PreTrainedModel):
    ids = prompt(2, 9)
    with torch.no_grad():
        states = llama.full(ids, output_hidden_states=True).hidden_states
    for start, stop in ((2, 5), (0, 3), (1, 2)):
        got = client.blocks[start:stop](states[start])
        assert difference(got, states[stop]) <= EXACT
    assert len(client.blocks) == 6
    with pytest.raises(BadBlocks):
        client.blocks[4:9]
    with pytest.raises(UsageError, match="range"):
        client.blocks[3]
    with pytest.raises(UsageError, match="hidden states are"):
        client.blocks[0:2](torch.zeros(1, 2, 3))


def test_a_range_of_blocks_takes_a_left_padded_batch(llama: World, client: PreTrainedModel):
    ids, mask = prompt(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        states = llama.full(ids, attention_mask=mask, position_ids=positions, output_hidden_states=True).hidden_states
    got = client.blocks[1:4](states[1], attention_mask=mask, position_ids=positions)
    assert difference(got[mask.bool()], states[4][mask.bool()]) <= EXACT
    assert difference(client.blocks[1:4](states[1])[mask.bool()], states[4][mask.bool()]) > 100 * EXACT


def test_a_prompt_beyond_the_models_limit_is_refused(client: PreTrainedModel):
    with pytest.raises(PromptTooLong) as refused:
        client(prompt(1, 300))
    assert (refused.value.positions, refused.value.limit, refused.value.limited_by) == (300, 256, "the model")


def test_a_batch_beyond_the_sessions_rows_is_refused(client: PreTrainedModel):
    with pytest.raises(UsageError, match=r"a batch of 257 is more than a session can have \(256\); split it"):
        client(prompt(257, 1))


def test_a_chat_beyond_its_session_is_refused_and_kept(llama: World, client: PreTrainedModel):
    with client.inference_session(max_length=20):
        first = client.generate(prompt(1, 10), max_new_tokens=3, **SAME)
        with pytest.raises(PromptTooLong) as refused:
            client.generate(torch.cat([first, prompt(1, 10)], dim=1), max_new_tokens=3, **SAME)
        assert (refused.value.limit, refused.value.limited_by) == (20, "the session")
        got = client.generate(first, max_new_tokens=2, **SAME)
    assert torch.equal(got, llama.full.generate(first, max_new_tokens=2, **SAME))


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_outputs_of_the_blocks_are_refused_by_name(client: PreTrainedModel, name: str):
    with pytest.raises(UsageError, match=name):
        client(prompt(1, 4), **{name: True})


def test_a_local_cache_is_refused(llama: World, client: PreTrainedModel):
    cache = DynamicCache(config=llama.full.config)
    with pytest.raises(UsageError, match="must come from this model"):
        client(prompt(1, 4), past_key_values=cache)
    with pytest.raises(UsageError, match="must come from this model"):
        client.generate(prompt(1, 4), past_key_values=cache, max_new_tokens=2, **SAME)


def test_each_thread_has_an_inference_session_of_its_own(llama: World, client: PreTrainedModel):
    texts = {number: prompt(1, 6 + number) for number in range(3)}
    expected = {number: llama.full.generate(text, max_new_tokens=4, **SAME) for number, text in texts.items()}

    def chat(number: int) -> Tensor:
        with client.inference_session(max_length=40):
            return client.generate(texts[number], max_new_tokens=4, **SAME)

    with client.inference_session(max_length=40), ThreadPoolExecutor(3) as others:
        client.generate(texts[0], max_new_tokens=4, **SAME)
        alone = others.submit(client.generate, texts[1], max_new_tokens=4, **SAME)
        chats = {number: others.submit(chat, number) for number in texts}
        assert torch.equal(alone.result(60), expected[1]), "it went on with another thread's text"
        assert all(torch.equal(chats[number].result(60), expected[number]) for number in texts)


def test_only_one_inference_session_at_a_time(client: PreTrainedModel):
    with client.inference_session(), pytest.raises(UsageError, match="already"), client.inference_session():
        pass


def test_a_model_that_has_left_says_so(llama: World):
    model = llama.client()
    model.generate(prompt(1, 4), max_new_tokens=2, **SAME)
    model.close()
    model.close()
    with pytest.raises(SessionClosed, match="has left the swarm"):
        model.generate(prompt(1, 4), max_new_tokens=2, **SAME)


def test_two_threads_generate_through_one_model_at_once(llama: World, client: PreTrainedModel):
    results: dict[int, Tensor] = {}

    def work(seed: int):
        results[seed] = client.generate(prompt(1, 6, seed), max_new_tokens=10, **SAME)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        assert torch.equal(results[seed], llama.full.generate(prompt(1, 6, seed), max_new_tokens=10, **SAME))


def difference(left: Tensor, right: Tensor) -> float:
    """The largest absolute difference."""
    assert left.shape == right.shape
    return float((left - right).detach().abs().max())
