"""The engine gives the tokens of the local model whatever happens to routes; its sessions end with their requests."""

import asyncio
from contextlib import aclosing

import pytest
import torch

from swarm.compute.scheduler import Part
from swarm.compute.thread import run as run_batch
from swarm.errors import BadRequest, NoRoute, PromptTooLong
from swarm.gateway.conversations import ConversationLimits
from swarm.gateway.engine import EngineLimits
from swarm.gateway.generation import Generation, Rerouted, Sampling, Started, Token
from swarm.gateway.grammar import GrammarLimits
from swarm.gateway.head import Head
from swarm.gateway.sampler import Sampler, choose
from tests.gateway.conftest import engine_of
from tests.gateway.random_model import chat_of, made
from tests.support.inprocess import inprocess
from tests.support.swarms import prompt

GREEDY = Sampling(temperature=0)


def ids_of(tokens: int, seed: int) -> tuple[int, ...]:
    return tuple(prompt(1, tokens, seed)[0].tolist())


def local(full, ids, tokens_max):
    """The local model's greedy continuation."""
    output = full.generate(torch.tensor([ids]), max_new_tokens=tokens_max, do_sample=False, eos_token_id=None)
    return output[0, len(ids) :].tolist()


async def run(engine, generation, on_token=lambda count: None):
    """Generate. Returns the tokens and all other events."""
    tokens, others = [], []
    async with aclosing(engine.generate(generation)) as emitted:
        async for each in emitted:
            if isinstance(each, Token):
                tokens.append(each.id)
                on_token(len(tokens))
            else:
                others.append(each)
    return tokens, others


def hosted(swarm):
    """How many sessions all servers hold."""
    return sum(len(server.handler.sessions) for server in swarm.servers)


async def freed(swarm, within_s=1.0):
    deadline = asyncio.get_running_loop().time() + within_s
    while hosted(swarm) and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.01)
    assert hosted(swarm) == 0


async def test_many_streams_get_the_local_models_tokens(engine, full):
    prompts = [ids_of(5 + 3 * i, seed=i) for i in range(6)]
    runs = [run(engine, Generation(prompt=ids, tokens_max=8, sampling=GREEDY)) for ids in prompts]
    for ids, (tokens, others) in zip(prompts, await asyncio.gather(*runs), strict=True):
        assert tokens == local(full, ids, 8)
        assert others[0] == Started(0)


async def test_seeded_stream_is_the_same_alone_and_among_others(engine):
    asked = [
        Generation(prompt=ids_of(6, seed=i), tokens_max=8, sampling=Sampling(temperature=1.2, seed=i), owner=str(i))
        for i in range(5)
    ]
    together = await asyncio.gather(*(run(engine, each) for each in asked))
    await engine.conversations.close()
    for each, (tokens, _) in zip(asked, together, strict=True):
        assert (await run(engine, each))[0] == tokens


async def test_stop_token_ends_the_output(engine, full):
    ids = ids_of(6, seed=3)
    expected = local(full, ids, 8)
    tokens, _ = await run(
        engine, Generation(prompt=ids, tokens_max=8, sampling=GREEDY, stop_ids=frozenset({expected[3]}))
    )
    assert tokens == expected[: expected.index(expected[3]) + 1]


async def test_hop_dies_under_every_stream_and_the_text_goes_on(checkpoint, full):
    prompts = [ids_of(5 + i, seed=i) for i in range(8)]
    with inprocess(checkpoint, "0:1", "1:4", "4:6", "1:4", "0:6") as swarm:
        async with engine_of(swarm) as engine:
            killed = []

            def kill(count):
                if count == 3 and not killed:
                    middle = next(iter(engine.swarm.sessions.open_sessions)).route[0].peer_id
                    killed.append(middle)
                    asyncio.get_running_loop().run_in_executor(None, crash, swarm, middle)

            runs = [run(engine, Generation(prompt=ids, tokens_max=40, sampling=GREEDY), kill) for ids in prompts]
            results = await asyncio.gather(*runs)
    for ids, (tokens, others) in zip(prompts, results, strict=True):
        assert tokens == local(full, ids, 40)
        changed = [each for each in others if isinstance(each, Rerouted)]
        assert any(killed[0] in each.left for each in changed)


def crash(swarm, peer):
    swarm.crash(next(server for server in swarm.servers if server.me.identity.peer_id == peer))


async def test_next_turn_computes_its_new_tokens_alone(engine, full):
    first = ids_of(40, seed=7)
    tokens, _ = await run(engine, Generation(prompt=first, tokens_max=5, sampling=GREEDY))
    second = (*first, *tokens, *ids_of(4, seed=8))
    answer, others = await run(engine, Generation(prompt=second, tokens_max=5, sampling=GREEDY))
    assert answer == local(full, second, 5)
    assert others[0] == Started(len(first) + len(tokens) - 1)  # the last token was never sent


async def test_edited_conversation_goes_back_to_where_it_parts(engine, full):
    first = ids_of(40, seed=9)
    await run(engine, Generation(prompt=first, tokens_max=5, sampling=GREEDY))
    edited = (*first[:30], *ids_of(12, seed=10))
    answer, others = await run(engine, Generation(prompt=edited, tokens_max=5, sampling=GREEDY))
    assert answer == local(full, edited, 5)
    assert others[0].cached >= 30


async def test_kept_session_is_not_continued_for_another_owner(engine):
    ids = ids_of(40, seed=11)
    await run(engine, Generation(prompt=ids, tokens_max=2, sampling=GREEDY, owner="ada"))
    _, others = await run(engine, Generation(prompt=ids, tokens_max=2, sampling=GREEDY, owner="bob"))
    assert others[0] == Started(0)


async def test_kept_session_outlives_a_hop(checkpoint, full):
    """Its past is replayed from the token ids."""
    first = ids_of(40, seed=7)
    with inprocess(checkpoint, "0:6", "0:6") as swarm:
        async with engine_of(swarm) as engine:
            tokens, _ = await run(engine, Generation(prompt=first, tokens_max=5, sampling=GREEDY))
            (session,) = engine.swarm.sessions.open_sessions
            await asyncio.to_thread(crash, swarm, session.route[0].peer_id)
            second = (*first, *tokens, *ids_of(4, seed=8))
            answer, others = await run(engine, Generation(prompt=second, tokens_max=5, sampling=GREEDY))
    assert answer == local(full, second, 5)
    assert others[0] == Started(len(first) + len(tokens) - 1)


async def test_closed_generation_frees_its_leases_at_once(swarm, engine):
    async with aclosing(engine.generate(Generation(prompt=ids_of(5, 1), tokens_max=90, sampling=GREEDY))) as emitted:
        async for each in emitted:
            if isinstance(each, Token):
                break
        assert hosted(swarm) > 0
    await freed(swarm)


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.05])
async def test_cancelled_prompt_frees_its_leases_at_once(swarm, engine, after_s):
    task = asyncio.create_task(run(engine, Generation(prompt=ids_of(110, 1), tokens_max=9, sampling=GREEDY)))
    await asyncio.sleep(after_s)
    task.cancel()
    await asyncio.wait({task})
    await engine.conversations.close()
    await freed(swarm)


async def test_output_that_is_ended_in_order_keeps_its_session(swarm, engine):
    ids = ids_of(40, seed=12)
    emitted = engine.generate(Generation(prompt=ids, tokens_max=90, sampling=GREEDY))
    async for each in emitted:
        if isinstance(each, Token):
            break
    with pytest.raises(StopAsyncIteration):
        await emitted.asend(True)
    assert len(engine.conversations) == 1
    _, others = await run(engine, Generation(prompt=(*ids, 5, 6), tokens_max=1, sampling=GREEDY))
    assert others[0] == Started(len(ids))


async def test_idle_sessions_give_way_to_one_that_needs_room(checkpoint, full):
    """The server has room for one conversation, and it is idle."""
    with inprocess(checkpoint) as swarm:
        swarm.serve("0:6", cache_tokens=128)
        async with engine_of(swarm, EngineLimits(crowded_s=0.05)) as engine:
            await run(engine, Generation(prompt=ids_of(90, seed=1), tokens_max=4, sampling=GREEDY))
            assert len(engine.conversations) == 1
            other = ids_of(90, seed=2)
            tokens, _ = await run(engine, Generation(prompt=other, tokens_max=4, sampling=GREEDY, owner="another"))
            assert tokens == local(full, other, 4)


class Spelling:
    """A grammar that allows one text: a choice of one token, then tokens that are forced, then a choice again."""

    def __init__(self, *parts: tuple[int, ...]) -> None:
        self.left = [list(part) for part in parts]

    def mask(self):
        while not self.left[0]:
            self.left.pop(0)
        mask = torch.zeros(128, dtype=torch.bool)
        mask[self.left[0][0]] = True
        return mask

    def take(self, token):
        assert token == self.left[0].pop(0)

    def forced(self):
        return list(self.left[0])

    @property
    def is_over(self):
        return not any(self.left)


async def test_forced_tokens_travel_in_one_step(engine, full):
    ids, steps = ids_of(20, seed=13), []
    grammar = Spelling((5, 6, 7, 8), (9,), (10, 11))
    real = engine.next

    async def counted(hidden, *rest):
        steps.append(rest[1])
        return await real(hidden, *rest)

    engine.next = counted
    tokens, _ = await run(engine, Generation(prompt=ids, tokens_max=20, sampling=GREEDY, grammar=grammar))
    assert tokens == [5, 6, 7, 8, 9, 10, 11]
    assert steps == [20, 24, 25]  # positions at which something was sampled
    longer = (*ids, *tokens[:4], *ids_of(3, seed=14))  # the forced tokens' positions are right: go on behind them
    answer, others = await run(engine, Generation(prompt=longer, tokens_max=4, sampling=GREEDY))
    assert answer == local(full, longer, 4)
    assert others[0].cached >= len(ids) + 4


async def test_grammar_that_fails_among_forced_tokens_is_no_clean_end(engine):
    limits = GrammarLimits(step_fuel=1, step_items=1)
    make = await asyncio.to_thread(made, chat_of({"type": "object", "additionalProperties": False}), limits=limits)
    asked = Generation(prompt=ids_of(5, seed=2), tokens_max=9, sampling=GREEDY, grammar=make())
    with pytest.raises(BadRequest):
        await run(engine, asked)
    assert not engine.swarm.sessions.open_sessions


async def test_forced_tokens_count_towards_the_limit(engine):
    grammar = Spelling((5, 6, 7, 8))
    asked = Generation(prompt=ids_of(5, seed=2), tokens_max=2, sampling=GREEDY, grammar=grammar)
    assert (await run(engine, asked))[0] == [5, 6]


async def test_forced_tokens_have_probabilities_where_these_are_asked_for(engine):
    """A forced token has no logits: it is sampled like any other then."""
    sampling, found = Sampling(temperature=0, logprobs=1), []
    asked = Generation(prompt=ids_of(5, seed=2), tokens_max=9, sampling=sampling, grammar=Spelling((5, 6, 7)))
    async with aclosing(engine.generate(asked)) as emitted:
        async for each in emitted:
            found += [each] if isinstance(each, Token) else []
    assert [token.id for token in found] == [5, 6, 7]
    assert all(token.logprob is not None and len(token.top) == 1 for token in found)


class Positions:
    """Ends whose embeddings are the positions, as learned ones depend on them."""

    def logits(self, hidden):
        return torch.zeros(len(hidden), 128)

    def embed(self, ids, start):
        starts = torch.as_tensor(start).reshape(-1, 1)
        return (starts + torch.arange(ids.shape[1])).expand(len(ids), -1).unsqueeze(-1).float()


def test_forced_tokens_are_embedded_at_their_positions():
    sampler = Sampler(GREEDY, (), Spelling((5, 6, 7, 8)))
    head = Head(Positions(), sampler, torch.zeros(1, 1, 1), 20, "ada")
    (sampled,) = head.forward_packed([head])
    assert [token.id for token in sampled.tokens] == [5, 6, 7, 8]
    assert sampled.embedding.flatten().tolist() == [20, 21, 22, 23]


class Breaking(Positions):
    """Ends that fail for batches."""

    def embed(self, ids, start):
        if len(ids) > 1:
            raise RuntimeError("too many")
        return super().embed(ids, start)


def test_a_batch_that_fails_behind_its_samples_samples_nothing_again():
    samplings = [Sampling(seed=seed, presence_penalty=1.0) for seed in range(3)]
    samplers = [*(Sampler(each, ()) for each in samplings), Sampler(GREEDY, (), Spelling((5, 6, 7, 8)))]
    heads = [Head(Breaking(), sampler, torch.zeros(1, 1, 1), 20, "ada") for sampler in samplers]
    assert run_batch([Part(head, 1, None, False) for head in heads]) == {}
    for head, sampling in zip(heads, samplings, strict=False):
        alone = Sampler(sampling, ())
        (token,) = choose(torch.zeros(1, 128), [alone])
        assert head.result().tokens == (token,)
        assert head._sampler.counts == alone.counts
        assert head._sampler.draw() == alone.draw()
    assert [token.id for token in heads[-1].result().tokens] == [5, 6, 7, 8]


async def test_echo_has_the_prompts_probabilities(engine, full):
    ids = ids_of(20, seed=4)
    asked = Generation(prompt=ids, tokens_max=0, sampling=Sampling(logprobs=2), echo=True)
    tokens, (started, _) = await run(engine, asked)
    assert tokens == []
    with torch.no_grad():
        expected = torch.log_softmax(full(torch.tensor([ids])).logits[0].float(), -1)
    assert started.echo[0] == Token(ids[0])
    for at, token in enumerate(started.echo[1:]):
        assert token.id == ids[at + 1]
        assert token.logprob == pytest.approx(float(expected[at, token.id]), abs=1e-4)
        assert [each.id for each in token.top] == expected[at].topk(2).indices.tolist()


async def test_prompt_in_pieces_is_the_same_prompt(swarm, full):
    ids = ids_of(50, seed=5)
    async with engine_of(swarm, EngineLimits(piece_tokens=7)) as engine:
        tokens, _ = await run(engine, Generation(prompt=ids, tokens_max=4, sampling=GREEDY))
    assert tokens == local(full, ids, 4)


async def test_more_than_the_context_is_refused_before_a_session_opens(swarm, engine):
    with pytest.raises(PromptTooLong):
        await run(engine, Generation(prompt=ids_of(10, 1) * 100, tokens_max=1))
    assert hosted(swarm) == 0


async def test_swarm_without_servers_raises_no_route(checkpoint):
    with inprocess(checkpoint) as swarm:
        async with engine_of(swarm) as engine:
            with pytest.raises(NoRoute):
                await run(engine, Generation(prompt=(1, 2), tokens_max=1))


async def test_idle_sessions_give_way_before_a_server_refuses_one(swarm):
    async with engine_of(swarm, EngineLimits(sessions_max=3, crowded_s=60.0)) as engine:
        for seed in range(5):
            await run(engine, Generation(prompt=ids_of(30, seed), tokens_max=1, sampling=GREEDY))
            assert len(engine.swarm.sessions.open_sessions) <= 3
        assert len(engine.conversations) == 3
    await freed(swarm)


async def test_conversations_have_a_budget(swarm):
    limits = EngineLimits(conversations=ConversationLimits(sessions_max=1))
    async with engine_of(swarm, limits) as engine:
        for seed in range(3):
            await run(engine, Generation(prompt=ids_of(30, seed), tokens_max=1, sampling=GREEDY))
        assert len(engine.conversations) == 1
    await freed(swarm)


async def test_servers_learn_owners_apart_but_not_by_name(engine, swarm):
    seen = {}
    for owner in ("", "ada", "bob", "ada"):
        generation = Generation(prompt=ids_of(6, seed=len(owner)), tokens_max=4, sampling=GREEDY, owner=owner)
        async with aclosing(engine.generate(generation)) as emitted:
            await anext(emitted)
            sessions = [session for server in swarm.servers for session in server.handler.sessions.values()]
            tenants = {session.tenure.tenant for session in sessions}
            assert len(tenants) == 1
            seen.setdefault(owner, set()).update(tenants)
    assert seen[""] == {None}
    assert len(seen["ada"]) == len(seen["bob"]) == 1
    assert seen["ada"] != seen["bob"]
    assert "ada" not in str(seen["ada"])
