"""A checkpoint's texts: its tokenizer, which turns text into tokens and back, its chat template and generation config.

Servers need none of them, so the root does not name them: two checkpoints with the same weights have the same servers,
with any tokenizers. They have a digest of their own. A pin is the root and that digest, with a plus between them.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from swarm.errors import CheckpointError, UnsupportedCheckpoint
from swarm.model.staging import staged

CONFIG_NAME = "config.json"
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Texts:
    """The files, as they were read, once. model: as the user wrote it. config: config.json, which they refer to."""

    model: str
    config: bytes
    files: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """Of the files' names and contents, 64 hex digits."""
        lines = (f"{name}\x00{hashlib.sha256(data).hexdigest()}\n" for name, data in sorted(self.files.items()))
        return hashlib.sha256(b"swarm texts 1\n" + "".join(lines).encode()).hexdigest()

    def generation_config(self) -> GenerationConfig:
        """Return the generation config, or without one, what the config says. Raises UnsupportedCheckpoint."""
        return self._made("generation config", self._generation_config)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Make the tokenizer, never by code that comes with it. Raises UnsupportedCheckpoint."""
        return self._made("tokenizer", self._tokenizer)

    def _generation_config(self) -> GenerationConfig:
        name = "generation_config.json"
        if name in self.files:
            with staged({name: self.files[name]}) as directory:
                return GenerationConfig.from_pretrained(directory)
        with staged({CONFIG_NAME: self.config}) as directory:
            return GenerationConfig.from_pretrained(directory, config_file_name=CONFIG_NAME, _from_model_config=True)

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        told = json.loads(self.files.get("tokenizer_config.json", b"{}"))
        elsewhere = [name for name in ("vocab", "merges", "gguf_file") if isinstance(told.get(name), str)]
        if elsewhere:
            raise ValueError(f"its config names a file of its own as {elsewhere[0]!r}")
        with staged({**self.files, CONFIG_NAME: self.config}) as directory:
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
            config._name_or_path = self.model  # some tokenizers' classes go by the name
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                directory, config=config, trust_remote_code=False, local_files_only=True
            )
        tokenizer.name_or_path = self.model
        return tokenizer

    def _made(self, what: str, make: Callable[[], Made]) -> Made:
        """Make something of the files, which may be anything. Raises UnsupportedCheckpoint, or what `staged` does."""
        try:
            return make()
        except CheckpointError:
            raise
        except Exception as error:  # noqa: BLE001 - Rust's own, and all that Python code raises which expects other JSON
            said = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise UnsupportedCheckpoint(self.model, f"its {what} does not load: {said[:200]}") from None


def text_files(names: Sequence[str]) -> tuple[str, ...]:
    """Return which of these names are of files that `Texts` has."""
    known = re.compile(
        r"generation_config\.json|tokenizer[\w.\-]*\.json|special_tokens_map\.json|added_tokens\.json"
        r"|chat_template\.(jinja|json)|additional_chat_templates/\w[\w.\-]*\.jinja"
        r"|vocab\.(json|txt)|merges\.txt|emoji\.json|word_\w+\.json|tekken\.json|dict\.txt|bpe\.codes"
        r"|\w[\w.\-]*\.(model|tiktoken|spm|tokenizer)"
    )
    return tuple(name for name in names if known.fullmatch(name))
