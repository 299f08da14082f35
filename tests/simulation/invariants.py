"""What must hold at every hop at every moment, looked at while production code runs."""

from dataclasses import replace

from swarm.server.gates import Facts, Gate, Gates, Stop
from swarm.server.session import HostedSession


def watched(gates: Gates, faults: list[str]) -> Gates:
    """Return the same gates, behind which every message of another epoch than its session's is noted as a fault."""

    def note(session: HostedSession, facts: Facts) -> Stop | None:
        epoch, now = int(facts.message.epoch), session.seat.epoch
        if epoch != now:
            faults.append(f"a frame of epoch {epoch} was taken in by a session of epoch {now}")
        return None

    last = Gate("watched", note)
    return replace(gates, step=(*gates.step, last), rebuild=(*gates.rebuild, last), void=(*gates.void, last))
