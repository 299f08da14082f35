"""Which nodes a dial-back asks, how long it waits for each, and when it knows enough. Their answers are scripted."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.dht.dialback import Answer, DialBackLimits, Findings, ask_dial_back, spread, write_message
from swarm.dht.sealing import Purpose
from swarm.dht.validator import RecordGate
from swarm.errors import TooBusy, Unreachable
from tests.dht.support import NETWORK

YES, NO = Answer(p2p=True), Answer(p2p=False)
BUSY = Answer(refused="later", busy=True)
BROKEN, SILENT = "broken", "silent"


class Writer:
    """Puts what is written into a reader."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    def write(self, data: bytes) -> None:
        self._reader.feed_data(data)

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


class FakeNode:
    """Knows helpers in their order, each with an answer, and the seconds after which it comes."""

    def __init__(self, helpers: Mapping[str, tuple[Answer | str, float]]) -> None:
        self.gate = RecordGate(NETWORK, lambda: 0.0)
        self.asked: list[str] = []
        self._helpers = helpers

    async def back(self) -> bool:
        return True

    def neighbours(self) -> tuple[str, ...]:
        return tuple(self._helpers)

    async def hosts(self) -> dict[str, str]:
        return {}

    async def open_stream(self, helper: str, _protocol: str) -> tuple[asyncio.StreamReader, Any]:
        self.asked.append(helper)
        answer, after_s = self._helpers[helper]
        await asyncio.sleep(after_s)
        if answer == BROKEN:
            raise Unreachable(helper, (), 0.0)
        reader = asyncio.StreamReader()
        if isinstance(answer, Answer):
            await write_message(Writer(reader), self.gate.seal.close(answer.model_dump_json().encode(), Purpose.ANSWER))  # type: ignore[arg-type]
        return reader, SimpleNamespace(write=lambda data: None, drain=lambda: asyncio.sleep(0), close=lambda: None)


async def ask(*answers: tuple[Answer | str, float], **limits: Any) -> tuple[Findings, list[str]]:
    node: Any = FakeNode({f"{i}": answer for i, answer in enumerate(answers)})
    return await ask_dial_back(node, None, p2p_port=4001, limits=DialBackLimits(**limits)), node.asked


async def test_two_of_three_helpers_are_enough() -> None:
    findings, asked = await ask((YES, 0.0), (SILENT, 0.0), (YES, 0.0), (NO, 0.0))
    assert (findings.p2p, asked) == (True, ["0", "1", "2"])


async def test_a_liar_that_is_fast_does_not_decide_alone() -> None:
    findings, _ = await ask((YES, 0.0), (NO, 0.1), (NO, 0.1))
    assert not findings.p2p


def test_an_honest_helper_gets_the_time_of_a_dial() -> None:
    limits = DialBackLimits()
    assert limits.last_helper_s > max(limits.dial_timeout_s, limits.port_timeout_s)


@pytest.mark.parametrize("failing", [BROKEN, BUSY])
async def test_helpers_that_fail_are_replaced(failing: Answer | str) -> None:
    findings, asked = await ask((YES, 0.0), (failing, 0.0), (failing, 0.0), (NO, 0.1), (NO, 0.1))
    assert (findings.p2p, asked) == (False, ["0", "1", "2", "3", "4"])


async def test_no_more_helpers_are_asked_than_the_limit() -> None:
    with pytest.raises(Unreachable):
        await ask(*[(BROKEN, 0.0)] * 10, (YES, 0.0), asked_max=10)
    findings, asked = await ask(*[(BROKEN, 0.0)] * 10, (YES, 0.0), asked_max=11)
    assert (findings.p2p, len(asked)) == (True, 11)


async def test_a_stopped_helper_is_not_waited_for_long() -> None:
    findings, _ = await ask((NO, 0.0), (SILENT, 0.0), last_helper_s=0.05)
    assert len(findings.found) == 1


async def test_helpers_without_time_are_no_verdict() -> None:
    with pytest.raises(TooBusy, match="ask again later"):
        await ask((BUSY, 0.0), (BROKEN, 0.0))


async def test_silence_of_all_helpers_is_unreachable_in_time() -> None:
    with pytest.raises(Unreachable, match="no answer"):
        await ask(*[(SILENT, 0.0)] * 5, answer_timeout_s=0.1)


@pytest.mark.parametrize(
    ("hosts", "order"),
    [
        ({}, "abcd"),
        ({"a": "1.2.3.4", "b": "1.2.9.9", "c": "1.3.0.1"}, "acdb"),
        ({"a": "2001:db8::1", "b": "2001:db8:7::1", "c": "2001:db9::1", "d": "1.2.3.4"}, "acdb"),
        (dict.fromkeys("abcd", "127.0.0.1"), "abcd"),
    ],
)
def test_helpers_of_different_networks_come_first(hosts: dict[str, str], order: str) -> None:
    assert "".join(spread("abcd", hosts)) == order
