"""One reading of the DHT: the models that are announced, and the records of their servers."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from swarm.dht.directory import Directory, ModelEntry
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
    surveys_max: int = limit(2, "models", "looked up at one time")
    records_max: int = limit(16384, "records", "kept; the rest is left out")


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a reading. other_protocols: major versions of servers that were left out."""

    records: tuple[Announcement, ...] = ()
    other_protocols: tuple[int, ...] = ()


async def read(directory: Directory, known: Mapping[str, KnownModel], limits: ReadingLimits) -> Found:
    """Read everything once. known: models that were served lately. Raises NetworkError, RecordError."""
    try:
        async with asyncio.timeout(limits.timeout_s):
            return await _records(directory, choose(await directory.models(), known), limits)
    except TimeoutError:
        raise DirectoryTimeout(limits.timeout_s) from None


async def _records(directory: Directory, chosen: Sequence[ModelEntry], limits: ReadingLimits) -> Found:
    turns = asyncio.Semaphore(limits.surveys_max)
    failures: list[SwarmError] = []

    async def survey(entry: ModelEntry) -> tuple[list[Announcement], tuple[int, ...]]:
        async with turns:
            try:
                found = await directory.survey(entry.root, entry.n_blocks, everybody=True)
            except SwarmError as error:
                failures.append(error)
                return [], ()
        return [signed.announcement for signed in found.servers], found.other_protocols

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(survey(entry)) for entry in chosen]
    if failures:  # half a reading would call models broken that are not
        raise failures[0]
    records = [record for task in tasks for record in task.result()[0]]
    others = {protocol for task in tasks for protocol in task.result()[1]}
    return Found(tuple(records[: limits.records_max]), tuple(sorted(others)))


def choose(entries: Sequence[ModelEntry], known: Mapping[str, KnownModel]) -> list[ModelEntry]:
    """Choose the models to look up: those that were served lately first, the rest while there is room.

    Any peer can announce names; a flood of them must not push out the models that work.
    """
    chosen: list[ModelEntry] = []
    for entry in sorted(
        set(entries), key=lambda e: (known.get(e.root) != KnownModel(e.name, e.n_blocks), e.n_blocks, e)
    ):
        if (entry.root, entry.n_blocks) in {(other.root, other.n_blocks) for other in chosen}:
            continue
        if len(chosen) == API.models_max:
            break
        chosen.append(entry)
    return chosen
