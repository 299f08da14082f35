"""Generation config, tokenizer and chat template: read once, named by a pin, never by a path that is read again."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from swarm.errors import BadConfiguration, ChecksumMismatch, RootMismatch, UnsupportedCheckpoint
from swarm.model.checkpoint import Checkpoint, ReadOnce, open_checkpoint
from swarm.model.loading import load_ends
from swarm.model.texts import Texts, text_files
from tests.support.hub import Hub
from tests.support.swarms import DEMO_CHECKPOINT

MESSAGES = [{"role": "user", "content": "def quicksort("}]
SWAPPED = {
    "tokenizer.json": (b'"def"', b'"fed"'),
    "tokenizer_config.json": (b'"pad_token"', b'"sep_token"'),
    "chat_template.jinja": (b"message.role", b"message.lore"),
    "generation_config.json": (b'"eos_token_id"', b'"bos_token_id"'),
}


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """The demo's checkpoint, which a test may change."""
    return Path(shutil.copytree(DEMO_CHECKPOINT, tmp_path / "demo"))


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        hub.add("org/demo", DEMO_CHECKPOINT, lfs=("tokenizer.json",))
        yield hub


@pytest.fixture
def open_from(hub: Hub, tmp_path: Path) -> Callable[..., Checkpoint]:
    def get(**options: str) -> Checkpoint:
        return open_checkpoint("org/demo", cache_dir=tmp_path / "cache", endpoint=hub.url, **options)

    return get


def swap(directory: Path, name: str) -> None:
    """Change a file, and leave its size and time as they were."""
    path, (old, new) = directory / name, SWAPPED[name]
    times, data = path.stat(), path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("name", SWAPPED)
def test_a_pin_names_the_texts(demo: Path, name: str) -> None:
    checkpoint = open_checkpoint(demo)
    pin = checkpoint.pin
    swap(demo, name)
    with pytest.raises(RootMismatch, match="tokenizer, chat template"):
        load_ends(open_checkpoint(demo, root=pin))
    assert open_checkpoint(demo, root=checkpoint.root).root == checkpoint.root  # its servers are the same


def test_a_pin_opens_what_it_was_made_of(demo: Path) -> None:
    pin = open_checkpoint(demo).pin
    again = open_checkpoint(demo, root=pin)
    assert again.pin == pin
    assert load_ends(again).generation_config.eos_token_id == again.texts().generation_config().eos_token_id


@pytest.mark.parametrize("name", SWAPPED)
def test_texts_swapped_after_they_were_read_are_not_used(demo: Path, name: str) -> None:
    checkpoint = open_checkpoint(demo)
    pin = checkpoint.pin
    swap(demo, name)
    tokenizer = checkpoint.texts().tokenizer()
    expected = AutoTokenizer.from_pretrained(DEMO_CHECKPOINT)
    assert tokenizer.apply_chat_template(MESSAGES) == expected.apply_chat_template(MESSAGES)
    assert tokenizer.special_tokens_map == expected.special_tokens_map
    assert checkpoint.texts().generation_config().eos_token_id == expected.eos_token_id
    assert checkpoint.pin == pin


def test_the_hub_and_a_local_copy_have_one_pin(open_from: Callable[..., Checkpoint]) -> None:
    checkpoint, local = open_from(), open_checkpoint(DEMO_CHECKPOINT)
    assert checkpoint.pin == local.pin
    expected = local.texts().tokenizer().apply_chat_template(MESSAGES)
    assert checkpoint.texts().tokenizer().apply_chat_template(MESSAGES) == expected


def test_opening_a_repository_fetches_no_tokenizer(hub: Hub, open_from: Callable[..., Checkpoint]) -> None:
    checkpoint = open_from()
    assert not set(text_files(checkpoint.source.names())) & hub.files_fetched("org/demo")


def test_a_tokenizer_that_is_not_the_listed_one_is_refused_and_fetched_again(
    hub: Hub, open_from: Callable[..., Checkpoint]
) -> None:
    hub.flip_byte("org/demo", "tokenizer.json", -40)
    with pytest.raises(ChecksumMismatch, match=r"tokenizer\.json"):
        open_from().texts()
    hub.heal()
    assert open_from().pin == open_checkpoint(DEMO_CHECKPOINT).pin


def test_a_template_that_the_hub_swaps_does_not_match_the_pin(
    hub: Hub, open_from: Callable[..., Checkpoint], demo: Path
) -> None:
    pin = open_from().pin
    swap(demo, "chat_template.jinja")
    hub.add("org/demo", demo, lfs=("tokenizer.json",))
    with pytest.raises(RootMismatch, match="tokenizer, chat template"):
        open_from(root=pin).texts()


def test_a_tokenizer_with_files_elsewhere_is_refused(demo: Path) -> None:
    """What they say could change behind the pin."""
    (demo / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "vocab": "/tmp/vocab.json"}')
    with pytest.raises(UnsupportedCheckpoint, match="a file of its own as 'vocab'"):
        open_checkpoint(demo).texts().tokenizer()


def test_further_chat_templates_are_texts_too(hub: Hub, demo: Path, tmp_path: Path) -> None:
    plain = open_checkpoint(demo).pin
    (demo / "additional_chat_templates").mkdir()
    (demo / "additional_chat_templates" / "rag.jinja").write_text("RAG {{ messages[0].content }}")
    hub.add("org/two", demo)
    local = open_checkpoint(demo)
    far = open_checkpoint("org/two", cache_dir=tmp_path / "cache", endpoint=hub.url)
    assert local.pin == far.pin != plain
    for checkpoint in (local, far):
        tokenizer = checkpoint.texts().tokenizer()
        said = tokenizer.apply_chat_template(MESSAGES, chat_template="rag", tokenize=False)
        assert said == "RAG def quicksort("


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"model": {"type": "Other"}}'),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"tokenizer_class": 5}'),
        ("tokenizer_config.json", '{"auto_map": ["x"]}'),
        ("generation_config.json", "[]"),
        ("generation_config.json", '{"max_new_tokens": "x"}'),
        ("generation_config.json", "no JSON"),
        ("generation_config.json", '{"max_new_tokens": -5}'),
    ],
)
def test_malformed_texts_are_refused_by_name(demo: Path, name: str, contents: str) -> None:
    (demo / name).write_text(contents)
    texts = open_checkpoint(demo).texts()
    with pytest.raises(UnsupportedCheckpoint, match="does not load"):
        _ = texts.generation_config() if name.startswith("generation") else texts.tokenizer()


def test_threads_that_ask_at_once_get_the_same_texts() -> None:
    def read() -> Texts:
        time.sleep(0.1)  # as long as a disk may take
        return Texts("demo", b"{}", {})

    texts = ReadOnce(read)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: texts(), range(32)))
    assert len({id(each) for each in found}) == 1


@pytest.mark.parametrize("pin", ["0" * 64 + "+", "+" + "0" * 64, "A" * 64, "0" * 63, ""])
def test_a_pin_of_another_form_is_refused(demo: Path, pin: str) -> None:
    with pytest.raises(BadConfiguration, match="64 hex digits"):
        open_checkpoint(demo, root=pin)


def test_a_checkpoint_without_a_tokenizer_says_so(demo: Path) -> None:
    for name in text_files(tuple(path.name for path in demo.iterdir())):
        (demo / name).unlink()
    with pytest.raises(UnsupportedCheckpoint, match="its tokenizer does not load"):
        open_checkpoint(demo).texts().tokenizer()
    assert load_ends(open_checkpoint(demo)).generation_config is not None
