"""Keeps the list of models in step with the swarm: those that servers announce, and that this gateway may load.

A server can announce any name. So a name alone makes the gateway neither load nor download anything: the model's files
are on this disk, or the operator allows their download. The files say which root the name has; records never do, and a
model is listed while servers announce that root.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import structlog
from huggingface_hub import try_to_load_from_cache

from swarm.dht.directory import Directory, ModelEntry
from swarm.errors import DownloadFailed, NetworkError, SwarmError
from swarm.gateway.loading import ModelOptions
from swarm.gateway.models import Models
from swarm.limits import limit
from swarm.model.checkpoint import Checkpoint, open_checkpoint
from swarm.model.loading import ends_files
from swarm.model.texts import CONFIG_NAME

_log = structlog.get_logger("swarm.gateway")


@dataclass(frozen=True, slots=True)
class FollowingLimits:
    """How the list of models follows the swarm."""

    every_s: float = limit(60.0, "s", "the directory is read this often for models that come and go")
    models_max: int = limit(64, "models", "that are listed; the rest is left out")
    retry_s: float = limit(600.0, "s", "a model that could not be opened is tried again after this")
    first_s: float = limit(10.0, "s", "the gateway is ready after this at the latest; models may follow")


def candidates(entries: Sequence[ModelEntry]) -> dict[str, frozenset[str]]:
    """Return the roots that servers announce for each name that can be a repository's. Names are strangers' text."""
    roots: dict[str, set[str]] = {}
    for entry in entries:
        hub_id = r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?"
        if re.fullmatch(hub_id, entry.name, re.ASCII) and ".." not in entry.name and "--" not in entry.name:
            roots.setdefault(entry.name, set()).add(entry.root)
    return {name: frozenset(found) for name, found in sorted(roots.items())}


class Following:
    """Adds and drops models as servers announce them."""

    def __init__(
        self,
        directory: Directory,
        models: Models,
        options: ModelOptions,
        allowed: Collection[str],
        now: Callable[[], float],
        limits: FollowingLimits | None = None,
    ) -> None:
        """allowed: names of the models that may be downloaded. now: in seconds."""
        self._now = now
        self._directory = directory
        self._models = models
        self._options = options
        self._allowed = frozenset(allowed)
        self.limits = limits or FollowingLimits()
        self._opened: dict[str, Checkpoint] = {}
        self._failed: dict[str, float] = {}  # when, by name

    async def run(self, begun: asyncio.Event) -> None:
        """Refresh again and again. begun: set when it was done once."""
        while True:
            try:
                await self.refresh()
            except Exception:  # noqa: BLE001 - a checkpoint may break its reader; the next refresh is a minute away
                _log.exception("the list of models stays as it is")
            begun.set()
            await asyncio.sleep(self.limits.every_s)

    async def refresh(self) -> None:
        """Read the directory, and list the models that it has and that may be loaded here."""
        try:
            entries = await self._directory.models()
        except NetworkError as error:
            _log.warning("the list of models stays as it is", why=str(error))
            return
        found: set[str] = set()
        for name, roots in candidates(entries).items():
            if len(found) < self.limits.models_max and (checkpoint := await self._checkpoint(name, roots)) is not None:
                found.add(name)
                if name not in self._models.names:
                    _log.info("model found", model=name)
                await self._models.put(checkpoint)
        for name in [name for name in self._models.names if name not in found]:
            _log.info("model gone", model=name)
            await self._models.drop(name)
        reasons = await self._models.routes()
        self._models.arrange(sorted(self._models.names, key=lambda name: (bool(reasons.get(name)), name)))

    async def _checkpoint(self, name: str, roots: frozenset[str]) -> Checkpoint | None:
        """Return the opened checkpoint of a name, if this gateway may have it and servers serve it."""
        opened = self._opened.get(name)
        if opened is not None and opened.root in roots:
            return opened
        now, failed = self._now(), self._failed.get(name)
        is_allowed = name in self._allowed
        if failed is not None and now - failed < self.limits.retry_s:
            return None
        if not is_allowed and not await asyncio.to_thread(is_cached, name, self._options):
            return None
        try:
            checkpoint = await asyncio.to_thread(opened_here, name, self._options, may_download=is_allowed)
        except SwarmError as error:
            self._failed[name] = now
            _log.warning("model left out", model=name, why=str(error))
            return None
        self._failed.pop(name, None)
        self._opened[name] = checkpoint  # kept whatever the records say: servers of these files may come any moment
        if checkpoint.root in roots:
            return checkpoint
        self._failed[name] = now
        _log.warning("no server announces the files that are here", model=name, root=checkpoint.root, theirs=min(roots))
        return None


def is_cached(name: str, options: ModelOptions) -> bool:
    """Whether the hub's cache has a repository's config and tokenizer."""
    revision = options.revision or "main"
    files = (CONFIG_NAME, "tokenizer_config.json")
    return all(
        isinstance(try_to_load_from_cache(name, file, cache_dir=options.cache_dir, revision=revision), str)
        for file in files
    )


def opened_here(name: str, options: ModelOptions, *, may_download: bool) -> Checkpoint:
    """Open a repository. Raises SwarmError, also where a download would be needed that is not allowed."""
    if not may_download and not is_cached(name, options):
        raise DownloadFailed(name, "it is not here")
    checkpoint = open_checkpoint(
        name,
        revision=options.revision,
        token=options.token,
        cache_dir=options.cache_dir,
    )
    if not may_download and checkpoint.source.lacks(ends_files(checkpoint)):
        raise DownloadFailed(name, "its embeddings and head are not here")
    return checkpoint


@asynccontextmanager
async def followed(following: Following | None) -> AsyncIterator[None]:
    """Keep the list in step within the block, which begins when it was read once, or after a while."""
    if following is None:
        yield
        return
    begun = asyncio.Event()
    running = asyncio.create_task(following.run(begun))
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(following.limits.first_s):
                await begun.wait()
        yield
    finally:
        running.cancel()
        await asyncio.wait({running})
