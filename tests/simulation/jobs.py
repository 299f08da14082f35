"""One run, as a process of a pool is given it: functions of `__main__` cannot be sent to one that is spawned."""

from tests.simulation.customer import Customer, lying_weather_of
from tests.simulation.guesser import Guesser
from tests.simulation.run import Outcome, User, anchored_weather_of, simulate, weather_of

Job = tuple[int, float, bool, str, float]
"""A seed, departures a minute, whether there are anchors, the class of the users, and the share of lying servers."""

USERS = {user.__name__: user for user in (User, Guesser, Customer)}


def simulate_job(job: Job, lines: list[str] | None = None) -> Outcome:
    """Run one seed. lines: is given all that happens, for a person to read."""
    seed, rate, anchors, user, liars = job
    weather = (anchored_weather_of if anchors else weather_of)(seed, rate)
    if liars:
        weather = lying_weather_of(weather, liars)
    return simulate(seed, rate, weather, lines, USERS[user])
