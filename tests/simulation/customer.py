"""A user that opens many short sessions, one after the other, and checks every token: what audits are for."""

import asyncio

from tests.simulation.run import Outcome, User
from tests.simulation.world import Client

SESSIONS = 40
TOKENS = 8  # of each
PAUSE_S = 3.0  # between sessions, in which most audits end


class Customer(User):
    """Repeats what a user does, with another prompt and in another session each time."""

    def __init__(self, seed: str, tokens: int, client: Client, outcome: Outcome) -> None:
        super().__init__(seed, tokens, client, outcome)
        self._seed = seed

    async def run(self) -> None:
        """Run the sessions. Raises Hang, or what a session raises."""
        outcome, client = self._outcome, self._client
        met: set[str] = set()
        try:
            for number in range(SESSIONS):
                wrong = outcome.wrong
                visit = User(f"{self._seed} {number}", TOKENS, client, outcome)
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
