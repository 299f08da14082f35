"""The board: the answers of the API, ready to be sent, and the clients that wait for the next ones.

Bodies are made in a worker thread when the facts change: a request only hands them out, however many servers there are.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from swarm.monitor.assess import Assessment, Sighting, assess
from swarm.monitor.metrics import metrics_text


@dataclass(frozen=True, slots=True)
class Published:
    """The answers of the API, ready to be sent. details by root."""

    assessment: Assessment
    state: bytes
    details: dict[str, bytes]
    metrics: bytes

    @classmethod
    def of(cls, sighting: Sighting, now: float, history_problem: str) -> "Published":
        """Assess the facts, and print the assessment. now: wall seconds."""
        assessment = assess(sighting, now)
        return cls(
            assessment,
            assessment.state.model_dump_json().encode(),
            {root: detail.model_dump_json().encode() for root, detail in assessment.details.items()},
            metrics_text(assessment.state, history_problem),
        )


class Board:
    """The latest answers. Lives in the loop. stopping: clients that wait for events are to go."""

    def __init__(self, first: Published, clients_max: int = 256) -> None:
        """clients_max: clients that may wait for events at one time; more are refused."""
        self.published = first
        self.stopping = False
        self._clients, self._clients_max = 0, clients_max
        self._revision = 0
        self._changed = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether no more clients may wait for events."""
        return self._clients >= self._clients_max

    @property
    def clients(self) -> int:
        """How many clients wait for events."""
        return self._clients

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Count a client that waits for events."""
        self._clients += 1
        try:
            yield
        finally:
            self._clients -= 1

    async def changed(self, timeout_s: float) -> bool:
        """Wait for something new to be published. Returns whether it was."""
        waiting = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await waiting.wait()
        except TimeoutError:
            return False
        return True

    async def publish(self, sighting: Sighting, now: float, history_problem: str) -> None:
        """Make the answers of these facts the latest ones."""
        self._revision += 1
        numbered = replace(sighting, revision=self._revision)
        published = await asyncio.to_thread(Published.of, numbered, now, history_problem)
        if published.assessment.state.revision < self.published.assessment.state.revision:
            return  # another task was faster with something newer
        self.published = published
        self._changed.set()
        self._changed = asyncio.Event()
        if self.stopping:
            self._changed.set()

    def stop(self) -> None:
        """Let the clients that wait for events go."""
        self.stopping = True
        self._changed.set()
