"""What turns text into tokens and back, and ends it: a checkpoint's generation config, tokenizer and chat template.

Servers need none of it, so the root does not name it: two checkpoints with the same weights have the same servers,
whatever their tokenizers are. It has a digest of its own. A pin is the root and that digest, with a plus between them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from swarm.errors import UnsupportedCheckpoint
from swarm.model.staging import staged

CONFIG_NAME = "config.json"


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
        """Return the generation config, or without one, what the config says of generation."""
        name = "generation_config.json"
        if name in self.files:
            with staged({name: self.files[name]}) as directory:
                return GenerationConfig.from_pretrained(directory)
        with staged({CONFIG_NAME: self.config}) as directory:
            return GenerationConfig.from_pretrained(directory, config_file_name=CONFIG_NAME, _from_model_config=True)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Make the tokenizer, never by code that comes with it. Raises UnsupportedCheckpoint."""
        try:
            with staged({**self.files, CONFIG_NAME: self.config}) as directory:
                tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                    directory, trust_remote_code=False, local_files_only=True
                )
        except (OSError, ValueError, KeyError) as error:
            why = f"its tokenizer does not load: {str(error).splitlines()[0][:200]}"
            raise UnsupportedCheckpoint(self.model, why) from None
        tokenizer.name_or_path = self.model
        return tokenizer


def text_files(names: Sequence[str]) -> tuple[str, ...]:
    """Return which of these names are of files that `Texts` has. With tokenizer.json, no other has the vocabulary."""
    configs = (
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
    )
    whole = "tokenizer.json"
    parts = (
        "vocab.json",
        "merges.txt",
        "vocab.txt",
        "tokenizer.model",
        "spiece.model",
        "sentencepiece.bpe.model",
        "tekken.json",
    )
    return tuple(name for name in (*configs, *((whole,) if whole in names else parts)) if name in names)
