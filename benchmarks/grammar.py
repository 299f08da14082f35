"""The costs of a grammar: compiling a request's schema, the mask of a token, and refusing schemas that are hostile.

    python benchmarks/grammar.py [--vocabulary 128000] [--rounds 20] [--quick] [--json PATH]

The tokenizer is made here: byte-level, with words of letters, numbers, and runs of punctuation as JSON has them. Valid
documents of one schema (nested objects, patterns, an enumeration, arrays) are walked token by token through the
gateway's own `Constraint`, in one thread. The first mask of a matcher is measured with the others. Masks are measured
in processor time, too: other work on the machine costs only the other figure.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import SEED, Samples, table, write_json
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swarm.errors import BadRequest
from swarm.gateway.chat import Chat, Tool, ToolChoice
from swarm.gateway.grammar import Grammars

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        "title": {"type": "string", "minLength": 1, "maxLength": 80},
        "status": {"enum": ["open", "closed", "waiting for an answer"]},
        "priority": {"type": "integer", "minimum": 1, "maximum": 5},
        "due": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "people": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "share": {"type": "number"},
                    "is_owner": {"type": "boolean"},
                },
                "required": ["name", "share"],
            },
        },
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["id", "title", "status", "priority", "due", "tags", "people", "note"],
}
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "servers",
    "compute",
    "blocks",
    "of",
    "one",
    "large",
    "model",
    "together",
]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--vocabulary", type=int, default=128_000)
    arguments.add_argument("--rounds", type=int, default=20, help="documents that are walked, and schemas compiled")
    arguments.add_argument("--quick", action="store_true", help="a small vocabulary, to see that it works")
    arguments.add_argument("--json", type=Path, help="where the raw samples go")
    options = arguments.parse_args()
    vocabulary, rounds = (4000, 2) if options.quick else (options.vocabulary, options.rounds)
    samples = asyncio.run(measured(vocabulary, rounds))
    rows = [
        [
            each.name,
            str(len(each.ms)),
            *(f"{value:.3f}" for value in (each.median, each.percentile(0.99), max(each.ms))),
        ]
        for each in samples
    ]
    table(f"milliseconds, {vocabulary} tokens", ("", "samples", "median", "p99", "most"), rows)
    write_json(options.json, "grammar", SEED, samples, vocabulary=vocabulary, rounds=rounds)


async def measured(vocabulary: int, rounds: int) -> list[Samples]:
    """Measure everything with one tokenizer."""
    chosen = random.Random(SEED)
    tokenizer = made_tokenizer(vocabulary, chosen)
    grammars = Grammars(tokenizer, vocabulary, frozenset({0}))
    viewed, compiled, copied = Samples("view of the tokenizer, once"), Samples("compile"), Samples("copy for a choice")
    mask, computed = Samples("mask"), Samples("mask, processor time")
    take, forced = Samples("take"), Samples("forced tokens")
    refused = Samples("hostile schema, refused or compiled")
    with timed(viewed):
        await grammars.make(answer({"type": "integer"}), "")
    for index in range(rounds):
        with timed(compiled):
            make = await grammars.make(answer({**SCHEMA, "title": f"variant {index}"}), "")
        assert make is not None
        with timed(copied):
            constraint = make()
        text = json.dumps(document(chosen), separators=(", ", ": "))
        for token in tokenizer.encode(text, add_special_tokens=False):
            with timed(forced):
                constraint.forced()
            with timed(mask), timed(computed, time.thread_time):
                allowed = constraint.mask()
            assert allowed is not None
            assert allowed[token], (text, tokenizer.decode(token))
            with timed(take):
                constraint.take(token)
        assert constraint.is_complete
    for schema in hostile():
        with timed(refused):
            await judged(grammars, schema)
    return [viewed, compiled, copied, mask, computed, take, forced, refused]


class timed:
    """Adds its block's time to samples."""

    def __init__(self, samples: Samples, clock: Callable[[], float] = time.perf_counter) -> None:
        self._samples = samples
        self._clock = clock

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(self, *_: object) -> None:
        self._samples.ms.append(1000 * (self._clock() - self._began))


def answer(schema: dict[str, Any]) -> Chat:
    return Chat(model="m", messages=[], schema=schema)


async def judged(grammars: Grammars, schema: dict[str, Any]) -> None:
    """Compile a schema as an answer's and as a tool's, and take its first masks."""
    for chat in (
        answer(schema),
        Chat(model="m", messages=[], tools=(Tool("f", "", schema),), tool_choice=ToolChoice("required")),
    ):
        try:
            make = await grammars.make(chat, "")
        except BadRequest:
            continue
        assert make is not None
        with suppress(BadRequest):  # one that would take too long
            make().mask()


def hostile() -> Iterator[dict[str, Any]]:
    """Yield schemas that would be expensive without limits."""
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}}
    yield deep
    for word in ("anyOf", "allOf", "prefixItems"):
        links = {f"d{i}": {word: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
        yield {"$ref": "#/$defs/d0", "$defs": {**links, "d30": {"type": "integer"}}}
    yield {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    yield {"enum": [f"value {i} of an enumeration" for i in range(1500)]}
    yield {"allOf": [{"anyOf": [{"properties": {f"x{i}": {"const": k}}} for k in range(8)]} for i in range(12)]}
    for pattern in (
        "^(.*a.{20}|.*b.{20}|.*c.{20})$",
        "(a|b)*a(a|b){60}",
        "^((a{1,1000}){1,1000}){1,1000}$",
        "^[\\p{L}\\p{N}]{1,10000}$",
        "^(a?){50}a{50}$",
    ):
        yield {"type": "string", "pattern": pattern}
    yield {"type": "string", "minLength": 10**9}
    yield {"type": "array", "items": {"type": "integer"}, "minItems": 10**6}


def document(chosen: random.Random) -> dict[str, Any]:
    """Return a document that the schema allows."""

    def said(words: int) -> str:
        return " ".join(chosen.choice(WORDS) for _ in range(words))

    return {
        "id": f"{''.join(chosen.choices('ABCXYZ', k=3))}-{chosen.randrange(1000, 9999)}",
        "title": said(8),
        "status": chosen.choice(SCHEMA["properties"]["status"]["enum"]),
        "priority": chosen.randint(1, 5),
        "due": f"20{chosen.randrange(24, 30)}-{chosen.randrange(10, 13)}-{chosen.randrange(10, 28)}",
        "tags": [said(1) for _ in range(chosen.randrange(5))],
        "people": [
            {"name": said(2), "share": chosen.randrange(100) / 4, "is_owner": chosen.random() < 0.5}
            for _ in range(chosen.randrange(4))
        ],
        "note": chosen.choice([None, said(30) + ' "quoted"\n']),
    }


def made_tokenizer(size: int, chosen: random.Random) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with this many tokens; the first one ends outputs."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {"<|end|>": 0, **{letter: index for index, letter in enumerate(sorted(letters), start=1)}}
    merges: list[tuple[str, str]] = []
    pieces = list(_pieces(chosen))
    while len(vocabulary) < size:
        left, right = _pair(pieces, chosen)
        whole = left + right
        if whole not in vocabulary and left in vocabulary and right in vocabulary:
            vocabulary[whole] = len(vocabulary)
            merges.append((left, right))
            pieces.append(whole)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")  # noqa: S106 - no password


def _pieces(chosen: random.Random) -> Iterator[str]:
    """Yield characters, the more often the more frequent they are: Ġ is a space."""
    yield from "Ġ" * 40 + "etaoinshrdlucmfwypvbgkjqxz" * 8 + "ETAOINSHRDLU" * 3
    yield from "0123456789" * 4 + '"":,{}[]()<>/\\.;_-=+*#!?' * 2
    yield from chosen.sample(sorted(pre_tokenizers.ByteLevel.alphabet()), 60)


def _pair(pieces: list[str], chosen: random.Random) -> tuple[str, str]:
    """Return two pieces that may stand together: a space begins a word, letters go with letters."""
    kind: Callable[[str], int] = lambda text: 0 if text.isalpha() else 1 if text.isdigit() else 2  # noqa: E731
    while True:
        left, right = chosen.choice(pieces), chosen.choice(pieces)
        if "Ġ" in right or len(left) + len(right) > 14:
            continue
        if left == "Ġ" or kind(left.removeprefix("Ġ") or "a") == kind(right):
            return left, right


if __name__ == "__main__":
    main()
