"""Reads a Markdown page as prose: its words, its sentences, the cells of its tables."""

import re

CODE = "`code`"  # inline code counts as one word
WITHOUT_ACTOR = frozenset(["who", "whoever", "what", "whatever", "nobody", "somebody", "anybody", "everybody"])
PRIVATE = re.compile(
    r"\b(?:troubles?|company|loans?|chatter|usual|(?:signs?) of life|(?:stands?|waits?|waiting|standing) in line)\b",
    re.I,
)


def outside_code(text: str) -> str:
    """Return the page without fenced and indented code, comments, and what links point at."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(?:^\n(?:^ {4}(?![-*\d]).*\n)+)", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]+`", CODE, text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)


def outside_tables_made(text: str) -> str:
    """Return the page without the regions that `make docs` writes."""
    return re.sub(r"<!-- table: [^>]*-->\n.*?<!-- end -->", "", text, flags=re.DOTALL)


def words(text: str) -> list[str]:
    """Return the words, inline code being one each."""
    return re.findall(r"`code`|[^\W_][\w'.,/%-]*", text)


def without_actor(text: str) -> float:
    """Return how many of 1,000 words are clauses' subjects that name no part: who, what, nobody, ..."""
    all_words = words(outside_code(text))
    return 1000 * sum(word.lower().strip(".,") in WITHOUT_ACTOR for word in all_words) / max(1, len(all_words))


def sentences(text: str) -> list[str]:
    """Return the sentences of paragraphs and list items: no headings, no tables."""
    found = []
    lines = [line for line in outside_code(text).splitlines() if not re.match(r"\s*(#|\||<|>)", line)]
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=[-*] |\d+\. )", "\n".join(lines)):
        found += [
            each
            for each in re.split(r"(?<=[.!?:;])\s+|(?<=[.!?:;][\"*)])\s+", " ".join(paragraph.split()))
            if words(each)
        ]
    return found


def sentence_length(text: str, share: float) -> int:
    """Return the number of words that this share of the sentences does not exceed."""
    lengths = sorted(len(words(sentence)) for sentence in sentences(text))
    return lengths[int(share * (len(lengths) - 1))] if lengths else 0


def cells(text: str) -> list[str]:
    """Return the cells of all tables, those of headings too."""
    rows = [line for line in outside_code(text).splitlines() if line.startswith("|") and not line.startswith("|--")]
    return [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def figures(cell: str) -> int:
    """Return how many numbers a cell has; a range is one, and a digit in a name or in code is none."""
    cell = re.sub(r"(\d) ?(?:to|-) ?(?=\d)", r"\1", re.sub(r"`[^`]*`", "", cell))
    return len(re.findall(r"(?<![\w.:-])[-+]?\d[\d,.]*(?![\w-]*[a-zA-Z]\w)", cell))
