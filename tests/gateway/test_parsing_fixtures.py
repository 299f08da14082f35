"""Recorded outputs of nine families (the package `canitoolcall`), whole and in pieces of three and one characters."""

from collections import Counter
from functools import cache

import pytest
from canitoolcall import checks
from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status

from swarm.gateway.families import family_of
from swarm.gateway.parsing import FamilyParser
from swarm.gateway.parts import Called, Thought

LEAST = 0.9  # of a family's fixtures
SHOWN = {  # what the template of a model has in it
    "gemma4": "<|tool_call>",
    "glm": "<arg_key>",
    "gpt-oss": "<|channel|> <|message|>",
    "mistral": "[TOOL_CALLS]",
    "qwen3-hermes": "<tool_call> <think>",
    "qwen3-xml": "<tool_call> <function= <parameter= <think>",
    "kimi": "<|tool_call_begin|>",
    "Kimi-K3": "<|open|> <|sep|>",
    "llama": "<|python_tag|>",
    "Llama-4-Scout-17B-16E-Instruct": "<|header_start|>",
    "deepseek": "｜DSML｜",  # noqa: RUF001
    "DeepSeek-V3-0324": "<｜tool▁calls▁begin｜>",  # noqa: RUF001
    "DeepSeek-V3.1": "<｜tool▁calls▁begin｜>",  # noqa: RUF001
}


@cache
def fixtures() -> dict[str, list[Fixture]]:
    by_family: dict[str, list[Fixture]] = {}
    for fixture in load_fixtures():
        by_family.setdefault(fixture.family, []).append(fixture)
    return by_family


def prompt_of(fixture: Fixture) -> str:
    if fixture.generation_prompt is not None:
        return fixture.generation_prompt
    return load_families()[fixture.family].reference_for(fixture.reference_model).default_generation_prompt


def parsed(fixture: Fixture, size: int) -> ParseResult:
    """What the parser makes of an output in pieces of this many characters."""
    shown = SHOWN.get(fixture.reference_model.rpartition("/")[2], SHOWN[fixture.family])
    tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in fixture.tools}
    parser, raw, parts = FamilyParser(family_of(shown), prompt_of(fixture), tools), fixture.raw_output, []
    for start in range(0, len(raw), size):
        parts += parser.feed(raw[start : start + size])
    parts += parser.close()
    return ParseResult(
        "".join(part for part in parts if isinstance(part, str)) or None,
        "".join(part.text for part in parts if isinstance(part, Thought)) or None,
        tuple(ParsedToolCall(part.name, part.arguments) for part in parts if isinstance(part, Called)),
    )


@pytest.mark.parametrize("family", sorted({name for name in SHOWN if name == name.lower()}))
def test_nine_of_ten_recorded_outputs_are_read_exactly(family):
    outcomes: Counter[Status] = Counter()
    failed = []
    for fixture in fixtures()[family]:
        whole = parsed(fixture, 1 << 30)
        observed = Observation(whole, {"one": parsed(fixture, 3), "token": parsed(fixture, 1)})
        status = checks.case_status(checks.run_checks(fixture, load_families()[family], observed))
        outcomes[status] += 1
        if status is not Status.PASS:
            failed.append(fixture.id)
    print(family, {status.value: count for status, count in outcomes.items()}, failed)
    assert outcomes[Status.PASS] >= LEAST * outcomes.total(), failed


def test_all_families_of_the_package_are_measured():
    assert set(fixtures()) <= set(SHOWN)
    assert sum(len(each) for each in fixtures().values()) >= 469
