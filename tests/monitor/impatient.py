"""`swarm-health` that reads the DHT every second and not every thirty, for tests that wait for what it sees."""

from functools import partial

from swarm.monitor import serve
from swarm.monitor.cli import main

serve.MonitorOptions = partial(serve.MonitorOptions, read_every_s=1.0)  # type: ignore[misc, assignment]

if __name__ == "__main__":
    main()
