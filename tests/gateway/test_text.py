"""Text of an output: whole characters, nothing of a stop string, tokens with their bytes."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from swarm.gateway.generation import Likely, Token
from swarm.gateway.text import Detokenizer, StopStrings, TokenTexts
from tests.support.swarms import DEMO_CHECKPOINT

PIECES = st.lists(st.text("abc", max_size=4), max_size=8)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_CHECKPOINT)


def test_pieces_are_whole_characters_and_together_the_text(tokenizer):
    text = "naïve 東京 🦀 end"
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)
    assert "" in pieces  # a character of several tokens waits for its last


class Bytes:
    """A tokenizer whose tokens are pieces of bytes."""

    def __init__(self, pieces):
        self.backend_tokenizer, self._pieces = self, pieces

    def decode(self, ids, *, skip_special_tokens):
        return b"".join(self._pieces[token] for token in ids).decode(errors="replace")


@pytest.mark.parametrize("text", ["ああああああx", "aあ🦀b", "\ufffd\ufffdあ"])
@pytest.mark.parametrize("first", [1, 2])
def test_tokens_that_end_one_character_and_begin_the_next_lose_none(text, first):
    raw = text.encode()
    cuts = [0, *range(first, len(raw), 3), len(raw)]
    pieces = [raw[start:stop] for start, stop in pairwise(cuts)]
    detokenizer = Detokenizer(Bytes(pieces))
    assert "".join(detokenizer.feed(token) for token in range(len(pieces))) + detokenizer.close() == text


@given(st.lists(st.integers(3, 2047), max_size=12))
def test_any_tokens_give_the_text_of_all(tokenizer, ids):
    """Bytes that are no characters too: each piece may then differ in its marks, and none is lost."""
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.feed(token) for token in ids) + detokenizer.close()
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    assert text.replace("�", "") == expected.replace("�", "")
    assert ("�" in text) == ("�" in expected)


def test_tokens_have_the_bytes_of_the_text(tokenizer):
    text, texts = "naïve 東京\n", TokenTexts(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(texts.of(token)[1] for token in ids).decode() == text
    report = texts.report(Token(ids[0], -0.5, (Likely(ids[0], -0.5),)))
    assert (report.raw, report.logprob) == (texts.of(ids[0])[1], -0.5)
    assert report.top == ((*texts.of(ids[0]), -0.5),)


@given(PIECES, st.lists(st.text("abc", min_size=1, max_size=3), max_size=2))
@example(["a", "ab"], ["aab"])
def test_stop_strings_end_the_text_where_they_begin(pieces, stop):
    strings, sent = StopStrings(stop), ""
    for piece in pieces:
        sent += strings.feed(piece)
        assert not any(each in sent for each in stop)
        if strings.found is not None:
            break
    else:
        sent += strings.close()
    fed, whole = "", "".join(pieces)
    for piece in pieces:  # the text as it was when a stop string was first there
        fed += piece
        ends = [fed.find(each) for each in stop if each in fed]
        if ends:
            assert sent == fed[: min(ends)]
            return
    assert (strings.found, sent) == (None, whole)
