"""Prompts that are too long cost little, and those of callers that have left delay no others."""

import asyncio
import threading

import pytest

from swarm.errors import PromptTooLong
from swarm.gateway.tokenizing import Tokenizing, TokenizingLimits


class Tokenizer:
    """One token for so many characters. read: the characters of each call; each waits for `go`."""

    def __init__(self, characters: int) -> None:
        self._characters = characters
        self.read: list[int] = []
        self.go = threading.Event()
        self.go.set()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.read.append(len(text))
        assert self.go.wait(30)
        return [7] * add_special_tokens + [1] * (len(text) // self._characters)


async def test_a_prompt_that_cannot_fit_is_refused_after_a_part_of_it():
    tokenizer = Tokenizer(1)
    with pytest.raises(PromptTooLong):
        await Tokenizing(tokenizer).ids("x" * 8_000_000, 40_000)
    assert sum(tokenizer.read) < 60_000


async def test_a_long_prompt_of_few_tokens_is_read_whole():
    tokenizer, text = Tokenizer(16), "x" * 100_000
    assert await Tokenizing(tokenizer).ids(text, 10_000) == (7, *[1] * 6250)
    assert await Tokenizing(tokenizer).ids(text, 10_000, special=False) == (1,) * 6250
    assert tokenizer.read.count(len(text)) == 2
    tokenizer.read.clear()
    assert len(await Tokenizing(tokenizer).ids(text, 100_000)) == 6251
    assert tokenizer.read == [len(text)], "nothing is read twice that may well fit"


async def test_callers_that_have_left_hold_few_threads_and_no_place():
    tokenizer = Tokenizer(16)
    tokenizer.go.clear()
    tokenizing = Tokenizing(tokenizer, TokenizingLimits(threads=2))
    try:
        left = [asyncio.create_task(tokenizing.ids("x" * 5000, 1000)) for _ in range(50)]
        while len(tokenizer.read) < 2:
            await asyncio.sleep(0.01)
        for task in left:
            task.cancel()
        ended = await asyncio.gather(*left, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 5), 5) == 5, "others' threads are free"
    finally:
        tokenizer.go.set()
    assert len(await tokenizing.ids("x" * 5000, 1000)) == 313
    assert len(tokenizer.read) == 3, "who had left was not read for"
