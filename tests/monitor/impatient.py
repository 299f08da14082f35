"""`swarm-health` that reads the DHT every second and not every thirty, for tests that wait for what it sees."""

from functools import partial

from swarm.monitor import serve
from swarm.monitor.cli import main
from swarm.monitor.service import MonitorLimits

serve.HealthArguments = partial(serve.HealthArguments, limits=MonitorLimits(read_every_s=1.0))  # type: ignore[misc, assignment]

if __name__ == "__main__":
    main()
