"""From a folder of text to windows of tokens."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from swarm.client.distilling.limits import DistilLimits
from swarm.errors import BadConfiguration


def texts_in(folder: Path, limits: DistilLimits = DistilLimits()) -> Iterator[str]:  # noqa: B008 - frozen
    """Yield the texts of a folder and the folders in it, in an order that says nothing. Raises BadConfiguration.

    What is hidden, empty or not UTF-8 is left out. Links to folders are not followed.
    """
    if not folder.is_dir():
        raise BadConfiguration("texts", f"{str(folder)!r} is not a folder")
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if len(paths) > limits.files_max:
        raise BadConfiguration("texts", f"{str(folder)!r} has {len(paths):,} files; {limits.files_max:,} at most")
    Random(0).shuffle(paths)  # noqa: S311 - the same order each time
    for path in paths:
        with path.open("rb") as file:
            data = file.read(limits.file_bytes_max)
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            if error.start < limits.file_bytes_max - 4:
                continue
            text = data[: error.start].decode()  # cut off within a character
        if text.strip():
            yield text


def windows(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], *, positions: int, windows_max: int, vocabulary: int
) -> Tensor:
    """Return texts one behind the other, cut into windows: int32 [windows, positions].

    Each window begins as the tokenizer begins a text. vocabulary: of the model. Raises BadConfiguration.
    """
    begin = [tokenizer.bos_token_id] if _begins(tokenizer) else []
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    body = positions - len(begin)
    pending: list[int] = []
    cut: list[Tensor] = []
    for text in texts:
        pending += [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], *end]
        whole = min(len(pending) // body, windows_max - len(cut))
        cut += [
            torch.tensor([*begin, *pending[at : at + body]], dtype=torch.int32) for at in range(0, whole * body, body)
        ]
        pending = pending[whole * body :]
        if len(cut) == windows_max:
            break
    if len(cut) < 2:  # one to learn from, and one to see how well
        raise BadConfiguration("texts", f"they have fewer than {2 * positions} tokens")
    found = torch.stack(cut)
    if int(found.max()) >= vocabulary:
        raise BadConfiguration("texts", f"the tokenizer has tokens that the model, with {vocabulary}, has not")
    return found


def _begins(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts its own token in front of a text."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
