"""How families of models write reasoning and calls: a table of marks. A chat template shows its family.

The marks are those of the families' own templates and documents. Patterns are matched against text that is not complete
yet, so a match at its edge must not change when more comes.
"""

# ruff: noqa: RUF001 - marks of some families have wide characters

from dataclasses import dataclass

import regex
from regex import Pattern
from transformers import PreTrainedTokenizerBase

from swarm.gateway.calls import Form, Nested, Tagged

_re = regex.compile


@dataclass(frozen=True, slots=True)
class Thought:
    """Marks around reasoning.

    opens: special tokens, which text never contains. begins: the mark is plain text, which an answer may quote, so it
    opens reasoning only where nothing has been said. opened: a prompt that ends so has begun it.
    """

    closes: Pattern[str]
    opens: Pattern[str] | None = None
    begins: Pattern[str] | None = None
    opened: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One way to write an output.

    shows: a template of the family contains all marks of one of these groups. thought: marks around reasoning.
    calls: forms of calls. drops: marks that only structure the output. cut: remains of a mark at the end of an
    output, which are no text. trims: blanks before a call belong to its mark. call_ends_thought: a call inside
    reasoning ends it. is_guess: no mark of calls has decided.
    """

    name: str
    shows: tuple[tuple[str, ...], ...]
    thought: Thought | None = None
    calls: tuple[Form, ...] = ()
    drops: Pattern[str] | None = None
    cut: Pattern[str] | None = None
    trims: bool = True
    call_ends_thought: bool = False
    is_guess: bool = False


def _think() -> Thought:
    """Return the marks around reasoning that most families have."""
    return Thought(closes=_re("</think>"), begins=_re("<think>"), opened=("<think>",))


def _hermes() -> Nested:
    """Return the form of calls that most families without one of their own have."""
    return Nested(_re(r"<tool_call>\s*(?=[\[{])"), _re(r"[\s}]*</tool_call>"))


def _harmony() -> Family:
    """Return the family of gpt-oss. A call's addressee stands before the channel or behind it."""
    to, kind = r" to=functions\.(?P<name>[\w.\-]{1,256})", r"(?: ?(?:<\|constrain\|>)?\w{1,32})?"
    return Family(
        name="harmony",
        shows=(("<|channel|>", "<|message|>"),),
        thought=Thought(
            closes=_re(r"<\|end\|>"), opens=_re(r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>")
        ),
        calls=(
            Nested(
                _re(
                    rf"(?:<\|start\|>assistant)?(?:{to}<\|channel\|>\w{{1,32}}"
                    rf"|<\|channel\|>\w{{1,32}}{to}){kind}<\|message\|>"
                ),
                _re(r"\s*<\|(?:call|end|return)\|>"),
            ),
        ),
        drops=_re(
            r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)(?: to=(?!functions\.)[\w.]{1,64})?"
            rf"{kind}<\|message\|>"
            r"|<\|(?:end|call|return)\|>"
        ),
        cut=_re(
            rf"(?:<\|start\|>(?:assistant)?)?(?:{to})?"
            rf"(?:<\|channel\|>(?:analysis|commentary|final)?(?:{to})?)?(?: ?<\|constrain\|>)?(?:json)?"
        ),
        trims=False,
    )


FAMILIES = (
    _harmony(),
    Family(
        name="kimi-k3",
        shows=(("<|open|>", "<|sep|>"),),
        thought=Thought(
            closes=_re(r"<\|close\|>think<\|sep\|>|(?=<\|open\|>response<\|sep\|>)"),
            opens=_re(r"<\|open\|>think<\|sep\|>"),
            opened=("<|open|>think<|sep|>",),
        ),
        calls=(
            Tagged(
                opening=_re(
                    r'<\|open\|>call tool="(?P<name>[^"\n]{1,256})"[^<]{0,64}<\|sep\|>'
                    r"(?=<\|open\|>argument|<\|close\|>call)"
                ),
                key=_re(r'<\|open\|>argument key="(?P<key>[^"\n]{1,256})"(?: type="(?P<kind>\w+)")?<\|sep\|>'),
                value_end=_re(r"<\|close\|>argument<\|sep\|>(?=<\|open\|>argument|<\|close\|>call)"),
                end=_re(r"<\|close\|>call<\|sep\|>"),
                escapes=True,
            ),
            Nested(
                _re(
                    r'<\|open\|>call tool="(?P<name>[^"\n]{1,256})"[^<]{0,64}<\|sep\|>'
                    r"<\|open\|>json[^<]{0,64}<\|sep\|>\s*(?=\{)"
                ),
                _re(r"\s*<\|close\|>json<\|sep\|><\|close\|>call<\|sep\|>"),
            ),
        ),
        drops=_re(r"<\|open\|>(?:response|tools)<\|sep\|>|<\|close\|>(?:response|tools|message)<\|sep\|>"),
        trims=False,
    ),
    Family(
        name="kimi-k2",
        shows=(("<|tool_call_begin|>",), ("<|tool_calls_section_begin|>",)),
        thought=_think(),
        calls=(
            Nested(
                _re(r"<\|tool_call_begin\|>\s*(?P<id>[^<\s]{1,256})\s*<\|tool_call_argument_begin\|>\s*(?=\{)"),
                _re(r"\s*<\|tool_call_end\|>"),
            ),
        ),
        drops=_re(r"<\|tool_calls_section_(?:begin|end)\|>"),
        trims=False,
    ),
    Family(
        name="deepseek-dsml",
        shows=(("｜DSML｜",),),
        thought=_think(),
        calls=(
            Tagged(
                opening=_re(r'<｜DSML｜ ?invoke name="(?P<name>[^"\n]{1,256})"\s*(?P<empty>/)?>'),
                key=_re(r'\s*<｜DSML｜ ?parameter name="(?P<key>[^"\n]{1,256})"(?: string="(?P<kind>true|false)")?>'),
                value_end=_re(r"</｜DSML｜ ?parameter>(?=\s*</?｜DSML｜ ?(?:parameter|invoke))"),
                end=_re(r"\s*</｜DSML｜ ?invoke>"),
            ),
        ),
        drops=_re(r"</?｜DSML｜ ?(?:function_calls|tool_calls|calls)>"),
    ),
    Family(
        name="deepseek",
        shows=(("<｜tool▁calls▁begin｜>",), ("<｜tool▁call▁begin｜>",)),
        thought=_think(),
        calls=(
            Nested(
                _re(
                    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[^<\n]{1,256})\n```json\s*(?=\{)"
                    r"|(?P<name>[^<\n]{1,256})<｜tool▁sep｜>\s*(?=\{))"
                ),
                _re(r"\s*(?:```\s*)?<｜tool▁call▁end｜>"),
            ),
        ),
        drops=_re(r"<｜tool▁calls▁(?:begin|end)｜>"),
        trims=False,
    ),
    Family(
        name="gemma4",
        shows=(("<|tool_call>",),),
        thought=Thought(closes=_re(r"<channel\|>"), opens=_re(r"<\|channel>thought\n"), opened=("<|channel>thought",)),
        calls=(
            Nested(
                _re(r"<\|tool_call>\s*call:(?P<name>[^{<\s]{1,256})\s*(?=\{)"),
                _re(r"\s*<tool_call\|>"),
                dialect="gemma",
            ),
        ),
        cut=_re(r"<\|tool_call>\s*"),
        trims=False,
    ),
    Family(
        name="mistral",
        shows=(("[TOOL_CALLS]",), ("[THINK]",)),
        thought=Thought(
            closes=_re(r"\[/THINK\]|</think>"),
            opens=_re(r"\[THINK\]"),
            begins=_re("<think>"),
            opened=("[THINK]", "<think>"),
        ),
        calls=(
            Nested(
                _re(
                    r"\[TOOL_CALLS\]\s*(?:(?P<name>[\w.\-]{1,256})(?:\[CALL_ID\](?P<id>\w{1,64}))?(?:\[ARGS\])?\s*(?=\{)"
                    r"|(?=\[\s*\{))"
                ),
                _re(""),
                id_length=9,
            ),
        ),
        cut=_re(r"\[TOOL_CALLS\]\s*"),
        trims=False,
    ),
    Family(
        name="glm",
        shows=(("<arg_key>",),),
        thought=_think(),
        calls=(
            Tagged(
                opening=_re(r"<tool_call>\s*(?P<name>[^<>\s{\[]{1,256})(?=\s*<(?:arg_key|/tool_call)>)"),
                key=_re(r"\s*<arg_key>(?P<key>[^<\n]{1,256})</arg_key>\s*<arg_value>"),
                value_end=_re(r"</arg_value>(?=\s*<(?:arg_key|/tool_call)>)|(?=</tool_call>\s*<tool_call>)"),
                end=_re(r"\s*</tool_call>"),
                cut_value_end=_re(r"(?=</tool_call>)"),
            ),
        ),
        cut=_re(r"<tool_call>\s*"),
    ),
    Family(
        name="qwen-xml",
        shows=(("<function=", "<parameter="),),
        thought=_think(),
        calls=(
            Tagged(
                opening=_re(r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]{1,256})>"),
                key=_re(r"\s*<parameter=(?P<key>[^>\n]{1,256})>"),
                value_end=_re(
                    r"\n?</parameter>(?=\s*(?:<parameter=|</function>))"
                    r"|\n(?=<parameter=[^>\n]{1,256}>\n)"
                    r"|\n(?=</function>\s*</tool_call>)"
                ),
                end=_re(r"\s*</function>\s*</tool_call>"),
                newline=True,
                cut_end=_re(r"\s*</function>"),
            ),
        ),
        cut=_re(r"<tool_call>\s*"),
        call_ends_thought=True,
    ),
    Family(
        name="llama4",
        shows=(("<|header_start|>",), ("<|python_start|>",)),
        calls=(
            Nested(
                _re(r"\s*(?:<\|python_start\|>)?\s*(?=\[\s*[A-Za-z_][\w.]{0,255}\()"),
                _re(""),
                dialect="python",
                bare=True,
            ),
        ),
        drops=_re(r"<\|python_end\|>"),
        trims=False,
    ),
    Family(
        name="llama3",
        shows=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
        calls=(
            Nested(_re(r"<\|python_tag\|>\s*(?=\{)"), _re("")),
            Nested(_re(r'\s*(?:;\s*)?(?=\{\s*"(?:name|type|parameters|arguments|function)")'), _re(""), bare=True),
        ),
        cut=_re(r"<\|python_tag\|>\s*"),
        trims=False,
    ),
    Family(name="hermes", shows=(("<tool_call>",),), thought=_think(), calls=(_hermes(),), cut=_re(r"<tool_call>\s*")),
    Family(name="thinking", shows=(("<think>",), ("</think>",)), thought=_think(), calls=(_hermes(),), is_guess=True),
    Family(name="plain", shows=((),), calls=(_hermes(),), cut=_re(r"<tool_call>\s*"), is_guess=True),
)
"""The first whose marks a template shows is its family; the last one is shown by every template."""


def family_of(template: str) -> Family:
    """Return the family that a chat template shows."""
    for family in FAMILIES:
        if any(all(mark in template for mark in group) for group in family.shows):
            return family
    raise AssertionError("every template shows the last family")


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a tokenizer's chat template; of all, where it has several; "" where it has none."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else str(template or "")
