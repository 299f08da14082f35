"""Which drafts guess for a model, or for one call of `generate()`."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from swarm.client.hf.distilled import DistilledPredictor
from swarm.client.hf.drafter import DraftModel, unfit
from swarm.client.hf.lead import Drafting
from swarm.client.hf.mtp import MtpPredictor
from swarm.client.hf.statedraft import Predictor, StateDraft
from swarm.client.speculation.drafts import Lookup
from swarm.errors import BadConfiguration, ModelNotFound
from swarm.model.checkpoint import Checkpoint
from swarm.model.draftfiles import load_draft_head
from swarm.model.hollow import one_at_a_time
from swarm.model.mtp import load_mtp


class Drafts:
    """The drafts of one model."""

    def __init__(
        self, name: str, vocabulary: int, drafting: Drafting | None, mtp: Callable[[], Drafting] | None = None
    ) -> None:
        """name: of the model, a hub id or a directory. vocabulary: its tokens. drafting: of calls that say nothing.

        mtp: loads the blocks for multi-token prediction.
        """
        self.drafting = drafting
        self._load_mtp = mtp
        self._mtp: Drafting | None = None
        self._name = name
        self._vocabulary = vocabulary
        self._latest: tuple[PreTrainedModel, Drafting] | None = None

    def of_call(self, kwargs: dict[str, Any], batch: int | None) -> Drafting | None:
        """Return where the guesses of a call of `generate()` come from, and take out of its arguments what says so.

        So the call is a plain one, whose tokens are those of a plain one. batch: rows; of more than one, `transformers`
        decides. Raises BadConfiguration.
        """
        if batch != 1:
            return self.drafting
        if kwargs.get("prompt_lookup_num_tokens") is not None:
            del kwargs["prompt_lookup_num_tokens"]
            kwargs.pop("max_matching_ngram_size", None)
            return Drafting(Lookup, always=True)
        if kwargs.pop("use_mtp", None):
            return self._of_mtp()
        if kwargs.get("assistant_model") is not None and kwargs.get("assistant_tokenizer") is None:
            return self._of_model(kwargs.pop("assistant_model"))
        return self.drafting

    def _of_mtp(self) -> Drafting:
        if self._mtp is None:
            if self._load_mtp is None:
                raise BadConfiguration("use_mtp", "this model has no checkpoint to load these blocks from")
            self._mtp = replace(self._load_mtp(), always=True)
        return self._mtp

    def _of_model(self, small: PreTrainedModel) -> Drafting:
        latest = self._latest
        if latest is None or latest[0] is not small:
            latest = self._latest = small, drafting_by(small, self._name, self._vocabulary, always=True)
        return latest[1]


def drafting_by(small: PreTrainedModel, name: str, vocabulary: int, *, always: bool = False) -> Drafting:
    """Return what guesses by a small model, and by look-up where the text repeats itself. Raises BadConfiguration.

    name, vocabulary: as in `Drafts`.
    """
    draft = str(getattr(small, "name_or_path", ""))
    ours, theirs = _tokens(name), _tokens(draft) if draft else None
    if ours is not None and theirs is not None and ours != theirs:
        raise unfit(draft, name, "their tokenizers have other vocabularies")
    return Drafting(Lookup, always, DraftModel.of(small, vocabulary, name).draft)


def drafting_by_mtp(checkpoint: Checkpoint, ends: PreTrainedModel) -> Drafting:
    """Return what guesses by the model's own blocks for multi-token prediction, and by look-up.

    Raises as `load_mtp` does.
    """
    return _by(MtpPredictor(load_mtp(checkpoint, ends)), ends)


def drafting_by_head(folder: Path, checkpoint: Checkpoint, ends: PreTrainedModel) -> Drafting:
    """Return what guesses by a head that was distilled from the model, and by look-up. Raises BadConfiguration."""
    sizes = (checkpoint.traits.hidden_size, checkpoint.traits.embedding_size)
    head = load_draft_head(folder, root=checkpoint.root, sizes=sizes, dtype=ends.dtype, device=ends.device)
    return _by(DistilledPredictor.of(head, ends), ends)


def _by(predictor: Predictor, ends: PreTrainedModel) -> Drafting:
    return Drafting(Lookup, slow=StateDraft.of(predictor, ends).draft, reads_outputs=True)


def load_draft(draft: str | Path, *, device: torch.device | str, **hub: Any) -> PreTrainedModel:  # noqa: ANN401
    """Load a small model, never code that comes with it. hub: as in `from_pretrained`. Raises ModelNotFound."""
    try:
        with one_at_a_time():
            loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                str(draft), dtype="auto", trust_remote_code=False, attn_implementation=None, **hub
            )
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFound(str(draft), f"the draft does not load: {str(error).splitlines()[0][:200]}") from None
    placed: Any = loaded
    return placed.to(device).eval()  # type: ignore[no-any-return]


@lru_cache(maxsize=8)
def _tokens(name: str) -> dict[str, int] | None:
    """Return the vocabulary of a tokenizer on this disk; None where there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return None
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary
