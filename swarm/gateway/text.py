"""From sampled tokens to text as it may be sent: whole characters, and nothing of a stop string."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from swarm.gateway.chat import TokenText
from swarm.gateway.generation import Token


def _byte_level() -> dict[str, int]:
    """Return GPT-2's table: printable bytes stand for themselves, the others for characters from 256 on."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in kept}
    table.update({chr(256 + at): byte for at, byte in enumerate(sorted(set(range(256)) - set(kept)))})
    return table


class Detokenizer:
    """Text of one output, piece by piece. A piece ends where a character does, if the tokens make characters at all."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, special: bool = False) -> None:
        """special: whether special tokens are a part of the text."""
        self._tokenizer = tokenizer.backend_tokenizer
        self._special = special
        self._ids: list[int] = []  # of the last piece, whose end decides on spaces, and those behind it
        self._sent = 0  # how many of them are the last piece's
        self._before = ""  # the text of these ids that has been sent
        self._waiting = 0  # tokens since text was sent

    def feed(self, token: int) -> str:
        """Return the text that this token completes; "" while a character is not complete."""
        self._ids.append(token)
        text = self._text(self._ids)
        whole = text.rstrip("\ufffd")  # a decoder's mark for bytes that are no character
        if whole == text:
            return self._send(text)
        if len(whole) > len(self._before):  # a token ends a character, and begins the next one
            piece, self._before, self._waiting = whole[len(self._before) :], whole, 0
            return piece
        self._waiting += 1
        return "" if self._waiting < 4 else self._send(text)  # a character has 4 bytes, so more tokens begin none

    def close(self) -> str:
        """Return the text that is left at the end of the output."""
        return self._send(self._text(self._ids))

    def _send(self, text: str) -> str:
        piece, self._ids, self._waiting = text[len(self._before) :], self._ids[self._sent :], 0
        self._sent = len(self._ids)
        self._before = self._text(self._ids)
        return piece

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=not self._special)
        return text


class StopStrings:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.found: str | None = None
        self._stop = [each for each in stop if each]
        self._held = ""

    def feed(self, text: str) -> str:
        """Return the text that may be sent now. When a stop string is there, nothing of it is, and `found` is set."""
        self._held += text
        ends = [(at, each) for each in self._stop if (at := self._held.find(each)) >= 0]
        if ends:
            at, self.found = min(ends, key=lambda end: (end[0], -len(end[1])))
            sent, self._held = self._held[:at], ""
            return sent
        keep = max((_overlap(self._held, each) for each in self._stop), default=0)
        sent, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return sent

    def close(self) -> str:
        """Return the text that is held back, at the end of the output."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return how long the longest end of a text is with which a stop string begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0


class HeldTokens:
    """Holds an output's tokens, with their probabilities, until a parser knows whether they are text."""

    def __init__(self) -> None:
        self._tokens: list[TokenText] = []
        self._is_behind_mark = False  # and nothing has been said since

    def add(self, token: TokenText) -> None:
        """Hold one more."""
        self._tokens.append(token)

    def said(self, text: str, *, is_last: bool) -> tuple[TokenText, ...]:
        """Return the tokens of a text. is_last: no mark or call is known behind it, so all tokens are its own."""
        if self._is_behind_mark and not text[:1].isspace():
            while self._tokens and self._tokens[0].text.isspace():  # they belong to the mark
                self._tokens.pop(0)
        self._is_behind_mark = False
        count = len(self._tokens) if is_last else _covering(self._tokens, text)
        taken, self._tokens = self._tokens[:count], self._tokens[count:]
        return tuple(taken)

    def drop(self, text: str) -> None:
        """Leave out the tokens of reasoning, a mark or a call. text: is known behind it, and keeps its own tokens."""
        count = _covering(self._tokens[::-1], text)
        self._tokens = self._tokens[len(self._tokens) - count :]
        self._is_behind_mark = True

    def rest(self) -> tuple[TokenText, ...]:
        """Return the tokens behind the last text, at the end of the output."""
        return () if self._is_behind_mark else tuple(self._tokens)


def _covering(tokens: Sequence[TokenText], text: str) -> int:
    """Return how many of the first tokens have as many bytes as a text."""
    count, missing = 0, len(text.encode())
    while count < len(tokens) and missing > 0:
        missing -= len(tokens[count].raw)
        count += 1
    return count


class TokenTexts:
    """Writes tokens of one vocabulary as dialects report them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = "ByteLevel" in str(type(tokenizer.backend_tokenizer.decoder))
        self._table = _byte_level()
        self.of = lru_cache(maxsize=8192)(self._of)

    def report(self, token: Token) -> TokenText:
        """Return a token with the text of it and of the likeliest others."""
        assert token.logprob is not None
        top = tuple((*self.of(each.id), each.logprob) for each in token.top)
        return TokenText(*self.of(token.id), token.logprob, top)

    def _of(self, token: int) -> tuple[str, bytes]:
        piece: Any = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return "", b""
        if self._is_byte_level and all(character in self._table for character in piece):
            raw = bytes(self._table[character] for character in piece)
            return raw.decode(errors="replace"), raw
        text = str(self._tokenizer.decode([token], skip_special_tokens=False))
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            raw = bytes([int(piece[3:5], 16)])
            return raw.decode(errors="replace"), raw
        if piece.startswith("▁") and not text.startswith(" "):  # a decoder drops the space of a first word
            text = " " + text
        return text, text.encode()
