"""One reading of the DHT: the models that are announced, and the records of their servers."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from swarm.dht.directory import Directory, ModelEntry, Survey
from swarm.dht.records import Announcement
from swarm.errors import NetworkError, SwarmError
from swarm.limits import limit
from swarm.monitor.assess import KnownModel
from swarm.monitor.state import API


@dataclass(eq=False)
class DirectoryTimeout(NetworkError):
    """A reading of the whole DHT that took too long."""

    says: ClassVar[str] = "the DHT was not read within {after_s:.0f} s"
    after_s: float


@dataclass(frozen=True, slots=True)
class ReadingLimits:
    """How much one reading looks at."""

    timeout_s: float = limit(25.0, "s", "a reading that takes longer has failed")
    strangers_s: float = limit(
        10.0, "s", "of it for models that were not served lately; those that take longer are left out"
    )
    surveys_max: int = limit(2, "models", "looked up at one time")
    records_max: int = limit(16384, "records", "kept; the rest is left out")


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a reading. other_protocols: major versions of servers that were left out."""

    records: tuple[Announcement, ...] = ()
    other_protocols: tuple[int, ...] = ()


async def read(directory: Directory, known: Mapping[str, KnownModel], limits: ReadingLimits) -> Found:
    """Read all models that were served lately, and of the others those for which there is time.

    known: models that were served lately. Raises NetworkError, RecordError.
    """
    surveys = _Surveys(directory, limits)
    try:
        async with asyncio.timeout(limits.timeout_s):
            chosen = choose(await directory.models(), known)
            lately = [entry for entry in chosen if _is_known(entry, known)]
            await surveys.run(lately)
            if surveys.failures:  # half a reading would call models broken that are not
                raise surveys.failures[0]
            strangers = [entry for entry in chosen if entry not in lately]
            with suppress(TimeoutError):
                async with asyncio.timeout(limits.strangers_s):
                    await surveys.run(strangers)
    except TimeoutError:
        raise DirectoryTimeout(limits.timeout_s) from None
    if surveys.failures and not surveys.done:
        raise surveys.failures[0]
    records = [signed.announcement for survey in surveys.done for signed in survey.servers]
    others = {protocol for survey in surveys.done for protocol in survey.other_protocols}
    return Found(tuple(records[: limits.records_max]), tuple(sorted(others)))


class _Surveys:
    """The look-ups of one reading: those that are done, and why others failed."""

    def __init__(self, directory: Directory, limits: ReadingLimits) -> None:
        self.done: list[Survey] = []
        self.failures: list[SwarmError] = []
        self._directory, self._turns = directory, asyncio.Semaphore(limits.surveys_max)

    async def run(self, entries: Sequence[ModelEntry]) -> None:
        """Look models up, a few at a time."""
        async with asyncio.TaskGroup() as group:
            for entry in entries:
                group.create_task(self._one(entry))

    async def _one(self, entry: ModelEntry) -> None:
        async with self._turns:
            try:
                self.done.append(await self._directory.survey(entry.root, entry.n_blocks, everybody=True))
            except SwarmError as error:
                self.failures.append(error)


def choose(entries: Sequence[ModelEntry], known: Mapping[str, KnownModel]) -> list[ModelEntry]:
    """Choose the models to look up: those that were served lately first, of the rest any while there is room.

    Any peer can announce names; a flood of them must not push out the models that work, nor keep new ones out for ever.
    """
    chosen: list[ModelEntry] = []
    strangers = random.sample(sorted(set(entries)), len(set(entries)))
    for entry in sorted(strangers, key=lambda entry: not _is_known(entry, known)):
        if (entry.root, entry.n_blocks) in {(other.root, other.n_blocks) for other in chosen}:
            continue
        if len(chosen) == API.models_max:
            break
        chosen.append(entry)
    return chosen


def _is_known(entry: ModelEntry, known: Mapping[str, KnownModel]) -> bool:
    return known.get(entry.root) == KnownModel(entry.name, entry.n_blocks)
