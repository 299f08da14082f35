"""Guesses that travel ahead of the gateway's generations: the answers are those of a gateway that guesses nothing."""

import asyncio
import json
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from swarm.client.speculation.drafts import Lookup
from swarm.client.speculation.limits import PaceLimits
from swarm.gateway import ahead as ahead_module
from swarm.gateway.ahead import Guessing, GuessLimits
from swarm.gateway.answering import Model
from swarm.gateway.chat import Chat, Completion, Finished, Text
from swarm.gateway.engine import EngineLimits
from swarm.gateway.generation import Generation, Rerouted, Sampling, Started, Token
from swarm.gateway.text import TokenTexts
from tests.client.test_ahead import Oracle
from tests.gateway.conftest import engine_of
from tests.gateway.test_engine import GREEDY, Spelling, crash, freed, hosted, ids_of, local, run
from tests.model.rings import save_family
from tests.support.inprocess import inprocess
from tests.support.often import rest_is_long
from tests.support.swarms import DEMO_CHECKPOINT

DELAY_S = 0.02
ALWAYS = GuessLimits(pace=PaceLimits(trip_s_min=0.0, lost=1000.0))  # on any route, however slow the test's machine is
LIMITS = EngineLimits(guesses=ALWAYS)
IDS = ids_of(12, seed=5)
SEEDED = Sampling(temperature=0.8, top_p=0.9, seed=7)
FEW = {5: 60.0, 6: 60.0}  # a text of two tokens repeats itself


@asynccontextmanager
async def distant(swarm, limits=LIMITS):
    """An engine to which answers take longer, as over a wide-area route."""
    async with engine_of(swarm, limits) as engine:
        opening, loop = engine.swarm.open, asyncio.get_running_loop()

        async def opened(*arguments):
            session = await opening(*arguments)
            step, put = session.step, session.put

            async def later(*arguments, **which):
                await asyncio.sleep(DELAY_S)
                return await step(*arguments, **which)

            def ahead(*arguments, **which):
                there, told, due = put(*arguments, **which), loop.create_future(), loop.time() + DELAY_S
                there.add_done_callback(lambda _: loop.call_at(due, tell, there, told))
                return told

            session.step, session.put = later, ahead
            return session

        engine.swarm.open = opened
        yield engine


def tell(there, told):
    if told.done():
        return
    if there.exception() is None:
        told.set_result(there.result())
    else:
        told.set_exception(there.exception())


@contextmanager
def guessing(engine, make):
    """Have an engine take its guesses from elsewhere. make: None for none."""
    before, engine.guessing.make = engine.guessing.make, make
    yield
    engine.guessing.make = before


def knowing(text, right=0.8):
    """What makes drafts that know the text, and are wrong as often as they are told."""
    return lambda: Oracle(text, right)


async def tokens_of(engine, generation):
    """Generate in a new session. Returns the tokens, and what its random numbers would give next."""
    await engine.conversations.close()
    samplers, real, tokens = [], engine.next, []

    async def noted(hidden, sampler, *rest):
        samplers.append(sampler)
        return await real(hidden, sampler, *rest)

    engine.next = noted
    async with aclosing(engine.generate(generation)) as emitted:
        async for each in emitted:
            tokens += [each] if isinstance(each, Token) else []
    engine.next = real
    return tokens, samplers[-1].draw() if generation.sampling.temperature else None


def same(tokens, others):
    """Whether tokens are the same, and their probabilities but for the rounding."""
    assert [each.id for each in tokens] == [each.id for each in others]
    for one, other in zip(tokens, others, strict=True):
        assert [each.id for each in one.top] == [each.id for each in other.top]
        if one.logprob is not None:
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


async def test_greedy_text_is_the_local_models(swarm, full):
    expected = local(full, IDS, 30)
    async with distant(swarm) as engine:
        with guessing(engine, knowing((*IDS, *expected))):
            tokens, _ = await run(engine, Generation(prompt=IDS, tokens_max=30, sampling=GREEDY))
        assert tokens == expected
        assert 8 < engine.guessing.kept < engine.guessing.sent


WAYS = {
    "seeded": SEEDED,
    "seeded, with penalties": replace(SEEDED, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    "greedy, with probabilities": replace(GREEDY, logprobs=3, frequency_penalty=0.5),
}


@pytest.mark.parametrize("way", rest_is_long(WAYS, ("seeded, with penalties",)))
async def test_tokens_and_random_numbers_are_those_without_guesses(swarm, way):
    asked = Generation(prompt=IDS, tokens_max=30, sampling=WAYS[way])
    async with distant(swarm) as engine:
        with guessing(engine, None):
            expected, state = await tokens_of(engine, asked)
        assert engine.guessing.sent == 0
        with guessing(engine, knowing((*IDS, *(token.id for token in expected)))):
            tokens, drawn = await tokens_of(engine, asked)
        assert 8 < engine.guessing.kept < engine.guessing.sent
    same(tokens, expected)
    assert drawn == state


@pytest.mark.parametrize("sampling", [GREEDY, pytest.param(SEEDED, marks=pytest.mark.long)], ids=["greedy", "seeded"])
async def test_look_up_is_right_where_the_text_repeats_itself(swarm, sampling):
    asked = Generation(prompt=IDS, tokens_max=40, sampling=replace(sampling, logit_bias=FEW))
    async with distant(swarm) as engine:
        with guessing(engine, None):
            expected, state = await tokens_of(engine, asked)
        tokens, drawn = await tokens_of(engine, asked)
        assert engine.guessing.kept > 3
    same(tokens, expected)
    assert drawn == state


async def test_grammar_whose_tokens_are_forced_in_runs(swarm):
    """A run that is longer than a step of guesses, and shorter ones, of which the guesses know some."""
    parts = ((5, 6, 7, 8), (9,), (10, 11), (12,), tuple(range(20, 40)), (13,), (14,), (15, 16, 17), (18,))
    text = [token for part in parts for token in part]

    def asked():
        return Generation(prompt=IDS, tokens_max=60, sampling=GREEDY, grammar=Spelling(*parts))

    async with distant(swarm) as engine:
        with guessing(engine, knowing((*IDS, *text), right=0.9)):
            tokens, _ = await run(engine, asked())
            assert tokens == text
            assert engine.guessing.kept > 3
        longer = (*IDS, *text[:-1], 3, 4)
        with guessing(engine, None):
            answer, others = await run(engine, Generation(prompt=longer, tokens_max=4, sampling=GREEDY))
            assert others[0].cached >= len(longer) - 4
            await engine.conversations.close()
            assert (await run(engine, Generation(prompt=longer, tokens_max=4, sampling=GREEDY)))[0] == answer


async def test_next_turn_goes_on_behind_the_text_and_not_behind_guesses(swarm, full):
    """Guesses are still in flight when the answer ends, at its limit and in its midst."""
    first = ids_of(30, seed=7)
    expected = local(full, first, 30)
    async with distant(swarm) as engine:
        with guessing(engine, knowing((*first, *expected[:20], *[3] * 60), right=1.0)):
            emitted, tokens = engine.generate(Generation(prompt=first, tokens_max=90, sampling=GREEDY)), []
            async for each in emitted:
                tokens += [each.id] if isinstance(each, Token) else []
                if len(tokens) == 16:
                    break
            with pytest.raises(StopAsyncIteration):
                await emitted.asend(True)
            (session,) = engine.swarm.sessions.open_sessions
            assert session.length > len(first) + 15  # guesses lie behind the text
            assert tokens == expected[:16]
        second = (*first, *tokens, *ids_of(4, seed=8))
        with guessing(engine, knowing((*second, *local(full, second, 12)))):
            answer, others = await run(engine, Generation(prompt=second, tokens_max=12, sampling=GREEDY))
        assert others[0] == Started(len(first) + len(tokens) - 1)
        assert answer == local(full, second, 12)


async def test_hop_dies_with_guesses_in_flight(checkpoint, full):
    expected = local(full, IDS, 40)
    with inprocess(checkpoint, "0:2", "2:6", "0:2", "2:6") as swarm:
        async with distant(swarm) as engine:
            killed = []

            def kill(count):
                if count == 12:
                    (session,) = engine.swarm.sessions.open_sessions
                    killed.append(session.route[1].peer_id)
                    asyncio.get_running_loop().run_in_executor(None, crash, swarm, killed[0])

            with guessing(engine, knowing((*IDS, *expected))):
                tokens, others = await run(engine, Generation(prompt=IDS, tokens_max=40, sampling=GREEDY), kill)
            assert tokens == expected
            assert engine.guessing.kept > 8
    assert any(killed[0] in each.left for each in others if isinstance(each, Rerouted))


async def test_cancelled_generation_frees_its_leases_with_guesses_in_flight(swarm, full):
    text = (*IDS, *local(full, IDS, 60))
    async with distant(swarm) as engine:
        with guessing(engine, knowing(text, right=1.0)):
            asked = Generation(prompt=IDS, tokens_max=60, sampling=GREEDY)
            task = asyncio.create_task(run(engine, asked))
            while engine.guessing.kept < 4 and not task.done():
                await asyncio.sleep(0.001)
            (session,) = engine.swarm.sessions.open_sessions
            assert hosted(swarm) > 0
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
            assert session.error is not None
            await freed(swarm)
        assert engine.guessing.streams == 0


async def test_many_streams_guess_nothing_and_one_that_is_left_does(swarm, full):
    limits = replace(LIMITS, guesses=replace(ALWAYS, streams_max=2))
    text = (*IDS, *local(full, IDS, 16))
    async with distant(swarm, limits) as engine:
        with guessing(engine, knowing(text)):
            asked = [Generation(prompt=IDS, tokens_max=8, sampling=GREEDY, owner=str(i)) for i in range(3)]
            with engine.guessing.stream(), engine.guessing.stream():  # so that those that end last are many, too
                for tokens, _ in await asyncio.gather(*(run(engine, each) for each in asked)):
                    assert tokens == list(text[len(IDS) :][:8])
            assert engine.guessing.sent == 0
            await run(engine, replace(asked[0], tokens_max=16, owner="another"))
            assert engine.guessing.kept > 0


def test_one_stream_more_than_the_limit_fills_an_engine():
    guessing = Guessing(Lookup, GuessLimits(streams_max=2))
    with guessing.stream(), guessing.stream():
        assert not guessing.is_crowded
        with guessing.stream():
            assert guessing.is_crowded
    assert guessing.streams == 0


async def test_busy_hops_get_no_guesses(swarm, full, monkeypatch):
    text = (*IDS, *local(full, IDS, 12))
    async with distant(swarm) as engine:
        with guessing(engine, knowing(text)):
            for load, guesses in ((9.0, False), (0.0, True)):
                monkeypatch.setattr(ahead_module, "load_of", lambda _, load=load: load)
                await run(engine, Generation(prompt=IDS, tokens_max=12, sampling=GREEDY, owner=str(load)))
                assert bool(engine.guessing.sent) is guesses


async def test_no_guess_goes_beyond_the_answers_limit(swarm, full):
    text = (*IDS, *local(full, IDS, 10), *[3] * 60)
    async with distant(swarm) as engine:
        with guessing(engine, knowing(text, right=1.0)):
            await run(engine, Generation(prompt=IDS, tokens_max=10, sampling=GREEDY))
        (session,) = engine.swarm.sessions.open_sessions
        assert session.length == len(IDS) + 9  # the last token is never fed
        assert engine.guessing.kept > 2


@pytest.mark.long
async def test_long_text_is_read_in_pieces_before_it_is_searched(swarm):
    asked = Generation(prompt=ids_of(10, 3) * 4, tokens_max=40, sampling=replace(GREEDY, logit_bias=FEW))
    read = []

    class Noted(Lookup):
        def propose(self, text, guesses, count):
            read.append((len(text), count))
            return super().propose(text, guesses, count)

    async with distant(swarm, replace(LIMITS, guesses=replace(ALWAYS, read_tokens=16))) as engine:
        with guessing(engine, Noted):
            tokens, _ = await tokens_of(engine, asked)
        assert engine.guessing.kept > 3
        with guessing(engine, None):
            same(tokens, (await tokens_of(engine, asked))[0])
    assert read[:2] == [(16, 0), (32, 0)]
    assert all(count for length, count in read if length > 40)


@pytest.mark.long
async def test_sliding_windows_take_guesses_back(tmp_path):
    folder = save_family("gemma3_text", tmp_path / "gemma3_text")
    with inprocess(folder, "0:3", "3:6") as swarm:
        async with distant(swarm) as engine:
            asked = Generation(prompt=IDS, tokens_max=30, sampling=GREEDY)
            with guessing(engine, None):
                expected, _ = await tokens_of(engine, asked)
            ids = [token.id for token in expected]
            with guessing(engine, knowing((*IDS, *ids))):
                tokens, _ = await tokens_of(engine, replace(asked, tokens_max=20))
                same(tokens, expected[:20])
                assert 4 < engine.guessing.kept < engine.guessing.sent
                longer = replace(asked, prompt=(*IDS, *ids[:20]), tokens_max=10)
                answer, others = await run(engine, longer)
            assert others[0] == Started(len(IDS) + 19)
            assert answer == ids[20:]


async def test_recurrent_family_guesses_nothing(tmp_path):
    folder = save_family("mamba2", tmp_path / "mamba2")
    with inprocess(folder, "0:6") as swarm:
        async with distant(swarm) as engine:
            assert len((await run(engine, Generation(prompt=IDS, tokens_max=6, sampling=GREEDY)))[0]) == 6
            assert engine.guessing.make is None


async def test_draft_none_guesses_nothing(swarm):
    async with distant(swarm, replace(LIMITS, draft="none")) as engine:
        await run(engine, Generation(prompt=IDS, tokens_max=12, sampling=replace(GREEDY, logit_bias=FEW)))
        assert engine.guessing.sent == 0


# Answers: text, grammars, stop strings and usage


@pytest.fixture(scope="module")
def demo():
    with inprocess(DEMO_CHECKPOINT, "0:12") as swarm:
        yield swarm


async def answered(model, request):
    """The text of an answer with its tokens, and its end."""
    text, tokens, finished = "", [], None
    stream = model.chat(request) if isinstance(request, Chat) else model.complete(request)
    async with aclosing(stream) as events:
        async for event in events:
            if isinstance(event, Text):
                text += event.text
                tokens += event.tokens
            if isinstance(event, Finished):
                finished = event
    return text, tokens, finished


LIST = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 6, "maxItems": 6}
SAID = [{"role": "user", "content": "colours"}]
LOOP = Completion(
    model="demo", prompt="x = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3,", tokens_max=30, sampling=replace(GREEDY, logprobs=1)
)


@asynccontextmanager
async def model_of(swarm):
    async with distant(swarm) as engine:
        tokenizer = AutoTokenizer.from_pretrained(DEMO_CHECKPOINT)
        yield Model("demo", "0" * 64, engine, tokenizer, frozenset({tokenizer.eos_token_id}), TokenTexts(tokenizer))


async def same_answer(model, request):
    """Compare an answer and its usage with those without guesses. Returns it, and how many guesses it kept."""
    engine, answers = model.backend, []
    kept = engine.guessing.kept
    for make in (None, Lookup):
        await engine.conversations.close()
        with guessing(engine, make):
            answers.append(await answered(model, request))
    (text, tokens, finished), other = answers
    assert (text, finished) == (other[0], other[2])
    assert [each.text for each in tokens] == [each.text for each in other[1]]
    return text, finished, engine.guessing.kept - kept


async def test_stop_string_ends_the_text_where_it_does_without_guesses(demo):
    async with model_of(demo) as model:
        text, finished, _ = await same_answer(model, LOOP)
        assert finished.tokens == 30
        stop = text[len(text) * 2 // 3 :][:4]
        shorter, finished, kept = await same_answer(model, replace(LOOP, stop=(stop,)))
        assert shorter == text[: text.index(stop)]
        assert (finished.reason, finished.stop) == ("stop", stop)
        assert finished.tokens < 30
        assert kept > 2


async def test_schema_is_fulfilled_by_the_answer_without_guesses(demo):
    asked = Chat(model="demo", messages=SAID, schema=LIST, sampling=SEEDED, tokens_max=60)
    async with model_of(demo) as model:
        text, finished, kept = await same_answer(model, asked)
        assert set(json.loads(text)) <= {"red", "green"}
        assert finished.reason == "stop"
        assert kept > 2


def test_likely_guesses_alone_take_time_from_other_streams():
    guesses = Guessing(Lookup, GuessLimits())
    ahead = ahead_module.Ahead(None, (1, 2), guesses, None, positions_max=9, now=lambda: 0.0)
    assert ahead._pipe.cut_off == guesses.limits.ahead.cut_off_busy > guesses.limits.ahead.cut_off
