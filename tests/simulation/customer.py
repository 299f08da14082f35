"""A user that opens many short sessions, one after the other, and checks every token: what audits are for."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from tests.simulation.run import Outcome, User
from tests.simulation.world import Client, Weather

SESSIONS = 30
TOKENS = 20  # of each
PAUSE_S = 5.0  # between sessions
MEANWHILE = 3.0  # sessions that begin before an audit has ended: it takes some twenty seconds
AUDITED = 0.5  # of sessions: more than by default, so that few sessions show what audits do


def lying_weather_of(weather: Weather, liars: float) -> Weather:
    """Return the same faults among fewer servers, of which a share lies in every position."""
    return replace(weather, servers=50, liars=liars, audited=AUDITED)


def wrong_sessions_most(outcomes: Iterable[Outcome]) -> float:
    """Return how many sessions are wrong at most, on average, by docs/audits.md.

    Each lying server is found by the first of its sessions that is audited. Meanwhile, and while that audit goes on,
    its sessions are wrong.
    """
    every = list(outcomes)
    agreed, disputed, unaudited = (sum(getattr(o, name) for o in every) for name in ("agreed", "disputed", "unaudited"))
    audited = AUDITED * (agreed + disputed) / max(1, agreed + disputed + unaudited)
    return sum(o.met for o in every) * (1 / max(audited, 1e-9) + MEANWHILE)


class Visit(User):
    """One short session of one row: a row more costs every audit as much again."""

    batches = (1,)


class Customer(User):
    """Repeats what a user does, with another prompt and in another session each time."""

    sessions = SESSIONS

    def __init__(self, seed: str, tokens: int, client: Client, outcome: Outcome) -> None:
        super().__init__(seed, tokens, client, outcome)
        self._seed = seed

    async def run(self) -> None:
        """Run the sessions. Raises Hang, or what a session raises."""
        outcome, client = self._outcome, self._client
        met: set[str] = set()
        try:
            for number in range(self.sessions):
                wrong = outcome.wrong
                visit = Visit(f"{self._seed} {number}", TOKENS, client, outcome)
                await visit.run()
                outcome.sessions += 1
                outcome.wrong_sessions += outcome.wrong > wrong
                met |= visit.peers
                await asyncio.sleep(PAUSE_S)
        finally:
            audits, world = client.swarm.auditor.audits, client.world
            liars = {peer for peer in met | set(audits.wrong) if world.is_liar(peer)}
            outcome.met = len(liars)
            outcome.found = len(liars & set(audits.wrong))
            outcome.slandered = len(set(audits.wrong) - liars)
            outcome.agreed, outcome.disputed, outcome.unaudited = audits.agreed, audits.disputed, audits.unaudited
