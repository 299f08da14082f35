"""Checkpoints: a local directory or a repository of the hub, opened without touching its weights."""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import AutoConfig, PretrainedConfig

from swarm import config as settings
from swarm.blocks import Blocks
from swarm.errors import (
    BadBlocks,
    BadConfiguration,
    CheckpointError,
    ChecksumMismatch,
    ModelNotFound,
    RootMismatch,
    UnsupportedArchitecture,
    UnsupportedCheckpoint,
)
from swarm.model.formats import Packing, packing_of, refuse_gguf, without_quantisation
from swarm.model.hollow import decoder_config
from swarm.model.importance import IMPORTANCE_NAME, Importance, read_importance
from swarm.model.manifest import HashCache, Manifest, WeightIndex
from swarm.model.staging import staged
from swarm.model.texts import CONFIG_NAME, Texts, text_files
from swarm.model.traits import Traits, traits_of

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class Source(Protocol):
    """Where a checkpoint's files are."""

    def names(self) -> tuple[str, ...]:
        """Names of the files at the top level, and of those in `additional_chat_templates`."""

    def fetch(self, names: tuple[str, ...]) -> dict[str, Path]:
        """Make files local. Raises DownloadFailed."""

    def size(self, names: tuple[str, ...]) -> int:
        """Return how many bytes these files have together, without fetching them."""

    def manifest(self, names: tuple[str, ...]) -> Manifest:
        """Return the hashes of these files, without fetching weights."""

    def told(self, name: str) -> str | None:
        """Return the SHA-256 of a file that the source itself tells, if it does."""

    def lacks(self, names: tuple[str, ...]) -> bool:
        """Whether one of these files would be downloaded."""

    def discard(self, name: str) -> None:
        """Forget our copy of a file that turned out to be damaged. A file of the user stays."""


class ReadOnce:
    """A checkpoint's texts, read with the first call, whichever threads call."""

    def __init__(self, read: Callable[[], Texts]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._found: Texts | None = None

    def __call__(self) -> Texts:
        """Return the texts. Raises DownloadFailed, UnsupportedCheckpoint, ChecksumMismatch or RootMismatch."""
        with self._lock:
            if self._found is None:
                self._found = self._read()
            return self._found

    def anew(self) -> "ReadOnce":
        """Return one that reads again, for files that may have been mended."""
        return ReadOnce(self._read)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: its facts, and the source of its files."""

    model: str  # as the user wrote it
    config: PretrainedConfig
    config_bytes: bytes  # of config.json, verified; the config was made of them
    traits: Traits
    manifest: Manifest
    index: WeightIndex | None  # None: all tensors are in one file
    source: Source
    texts: "ReadOnce"
    packing: Packing | None = None  # how quantised weights are stored, where they are unpacked as they are read

    @property
    def n_blocks(self) -> int:
        """How many blocks the model has."""
        return self.traits.n_blocks

    @property
    def public_name(self) -> str:
        """The model's name in announcements: the hub id, or a directory's own name without its path."""
        return Path(self.model).resolve().name if Path(self.model).is_dir() else self.model

    @property
    def root(self) -> str:
        """The manifest's digest, 64 hex digits: the model's name in the swarm."""
        return self.manifest.root

    @property
    def pin(self) -> str:
        """The root and the texts' digest, for `root=`: whoever opens it so has the same files. Reads the texts."""
        return f"{self.root}+{self.texts().digest}"

    @property
    def weight_files(self) -> tuple[str, ...]:
        """The names of the files that have its tensors."""
        return (SINGLE_NAME,) if self.index is None else self.index.files

    def importance(self) -> Importance | None:
        """Return how much each input of its layers counts; None: no file beside the weights says so.

        Raises UnsupportedCheckpoint, ChecksumMismatch or DownloadFailed.
        """
        if IMPORTANCE_NAME not in self.source.names():
            return None
        path = self.source.fetch((IMPORTANCE_NAME,))[IMPORTANCE_NAME]
        try:
            return read_importance(self.model, path, self.root, self.source.told(IMPORTANCE_NAME))
        except ChecksumMismatch:
            self.source.discard(IMPORTANCE_NAME)
            raise

    def check(self, blocks: Blocks) -> None:
        """Raise BadBlocks where the model does not have these blocks."""
        if blocks.stop > self.n_blocks:
            raise BadBlocks(str(blocks), "it is out of range", self.n_blocks)


def open_checkpoint(
    model: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path | None = None,
    max_disk_bytes: int | None = None,
    root: str | None = None,
    accept_changes: bool = False,
    endpoint: str | None = None,
) -> Checkpoint:
    """Open a local directory or a repository of the hub. Only configs, index and hashes are read, never code.

    model: a directory, or a hub id such as "org/name". revision, token, cache_dir, max_disk_bytes and endpoint are
    for the hub. root: the root that the checkpoint must have, or its pin. accept_changes: local files whose contents
    changed since they were first hashed were changed on purpose.

    Raises ModelNotFound, UnsupportedCheckpoint, UnsupportedArchitecture, or a CheckpointError: ChecksumMismatch,
    RootMismatch, DownloadFailed, or one of a disk without room for a temporary copy.
    """
    name = str(model)
    if root is not None and not settings.is_root(root):
        raise BadConfiguration("root", f"{root!r}; it is 64 hex digits, or twice as many with a plus between them")
    refuse_gguf(name, (Path(name).name,))
    source: Source
    if Path(model).is_dir():
        source = LocalSource(Path(model), HashCache(settings.CACHE_DIR / "hashes"), accept_changes=accept_changes)
    else:
        from swarm.model.hub import HubSource  # noqa: PLC0415 - the hub's library is slow to import

        source = HubSource(
            name,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            max_disk_bytes=max_disk_bytes,
            endpoint=endpoint,
        )
    names = source.names()
    refuse_gguf(name, names)
    small = {each: _read(name, each, path) for each, path in source.fetch(_small_files(names)).items()}
    weights, index = _weight_files(name, names, small)
    manifest = source.manifest((*small, *weights))
    for each, data in small.items():  # these bytes and no others are used: the path is not read again
        _verify(source, manifest.files[each], each, data)
    asked, _, texts = (root or manifest.root).partition("+")
    if manifest.root != asked:
        raise RootMismatch(name, asked, manifest.root)
    config = decoder_config(_read_config(name, small[CONFIG_NAME]))
    packing = packing_of(name, config)
    if packing is not None:
        without_quantisation(config)
    reading = ReadOnce(lambda: _read_texts(name, small[CONFIG_NAME], source, texts))
    return Checkpoint(name, config, small[CONFIG_NAME], traits_of(config), manifest, index, source, reading, packing)


class LocalSource:
    """A directory with a config.json and safetensors."""

    def __init__(self, directory: Path, hashes: HashCache, *, accept_changes: bool) -> None:
        self.directory = directory
        self._hashes = hashes
        self._accept_changes = accept_changes

    def names(self) -> tuple[str, ...]:
        """Names of the files in the directory, and of those that its manifest lists. Raises ModelNotFound."""
        names = {path.name for path in self.directory.iterdir() if path.is_file()}
        names |= {
            f"{path.parent.name}/{path.name}" for path in self.directory.glob("additional_chat_templates/*.jinja")
        }
        if CONFIG_NAME not in names:
            refuse_gguf(str(self.directory), names)
            raise ModelNotFound(str(self.directory), f"the directory has no {CONFIG_NAME}")
        carried = Manifest.load(self.directory)
        return tuple(sorted(names | set(carried.files if carried else ())))

    def fetch(self, names: tuple[str, ...]) -> dict[str, Path]:
        """Return the files' paths. Raises UnsupportedCheckpoint for one that is not there."""
        for name in names:
            if not (self.directory / name).is_file():
                raise UnsupportedCheckpoint(str(self.directory), f"{name} is missing")
        return {name: self.directory / name for name in names}

    def size(self, names: tuple[str, ...]) -> int:
        """Return the files' bytes together. Raises UnsupportedCheckpoint for one that is not there."""
        return sum(path.stat().st_size for path in self.fetch(names).values())

    def manifest(self, names: tuple[str, ...]) -> Manifest:
        """Return the manifest that the directory carries, or hash its files. Raises ChecksumMismatch."""
        carried = Manifest.load(self.directory)
        if carried is not None:
            if set(carried.files) != set(names):
                raise UnsupportedCheckpoint(str(self.directory), "its manifest lists other files than its index")
            return carried
        paths = self.fetch(names)
        return Manifest(
            files={name: self._hashes.digest(path, accept_changes=self._accept_changes) for name, path in paths.items()}
        )

    def told(self, name: str) -> None:
        """Return nothing: a directory tells no hashes."""

    def lacks(self, names: tuple[str, ...]) -> bool:
        """Say no: nothing is downloaded."""
        del names
        return False

    def discard(self, name: str) -> None:
        """Do nothing: the file is the user's."""


def _small_files(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the files that say what the others mean."""
    return (CONFIG_NAME, INDEX_NAME) if INDEX_NAME in names and SINGLE_NAME not in names else (CONFIG_NAME,)


def _read(model: str, name: str, path: Path) -> bytes:
    """Read a small file, once and as a whole. Raises UnsupportedCheckpoint."""
    bytes_max = (4 if name == CONFIG_NAME else 128) << 20
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise UnsupportedCheckpoint(model, f"its {name} cannot be read: {error.strerror}") from None
    if len(data) > bytes_max:
        raise UnsupportedCheckpoint(model, f"its {name} is larger than {bytes_max >> 20} MiB; get the model's own")
    return data


def _read_texts(model: str, config: bytes, source: Source, digest: str) -> Texts:
    """Read generation config, tokenizer and chat template. digest: that they must have, or nothing."""
    files = {name: _read(model, name, path) for name, path in source.fetch(text_files(source.names())).items()}
    for name, data in files.items():
        if (told := source.told(name)) is not None:
            _verify(source, told, name, data)
    texts = Texts(model, config, files)
    if digest and texts.digest != digest:
        raise RootMismatch(model, digest, texts.digest, "a tokenizer, chat template or generation config of digest")
    return texts


def _verify(source: Source, expected: str, name: str, data: bytes) -> None:
    """Compare the bytes that were read with their hash. Raises ChecksumMismatch."""
    actual = hashlib.sha256(data).hexdigest()
    if actual != expected:
        source.discard(name)
        raise ChecksumMismatch(name, expected, actual)


def _weight_files(
    model: str, names: tuple[str, ...], small: Mapping[str, bytes]
) -> tuple[tuple[str, ...], WeightIndex | None]:
    """Return the names of the weight files, and the index where there is one. Raises UnsupportedCheckpoint."""
    if SINGLE_NAME in names:
        return (SINGLE_NAME,), None
    if INDEX_NAME in names:
        index = WeightIndex.parse(model, small[INDEX_NAME])
        return index.files, index
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in names):
        why = "its weights are pickles, which can run code when they are read; convert it to safetensors"
        raise UnsupportedCheckpoint(model, why)
    raise UnsupportedCheckpoint(model, f"it has neither {SINGLE_NAME} nor {INDEX_NAME}")


def _read_config(model: str, data: bytes) -> PretrainedConfig:
    """Read a config without ever running code that comes with it. Raises UsageError, or what `staged` does."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnsupportedCheckpoint(model, f"its {CONFIG_NAME} is not JSON: {error}") from None
    model_type = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(model_type, str):
        raise UnsupportedCheckpoint(model, f"its {CONFIG_NAME} names no model_type")
    try:
        with staged({CONFIG_NAME: data}) as directory:
            config: PretrainedConfig = AutoConfig.from_pretrained(
                directory, trust_remote_code=False, local_files_only=True
            )
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - a family's config takes any JSON and may break in any way
        known = "its code is not part of transformers" if "auto_map" in raw else "this transformers does not know it"
        raise UnsupportedArchitecture(model_type, f"{known} ({_first_line(error)})") from None
    config._attn_implementation = None  # this side chooses: transformers fetches a named one from the hub, and runs it
    return config


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:160]
