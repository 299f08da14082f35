"""Which p2pd may be started: the ones that hivemind's published wheels carry, by their hashes, and no other.

p2pd is the only native program that the swarm starts. It arrives inside a Python package, where an index, a mirror, a
build from source or a careless packager can put another one in its place: hivemind 1.1.11 was withdrawn because all
its wheels carried the binary of one platform.
"""

import hashlib
import platform
import sys
from pathlib import Path

from swarm.errors import BadConfiguration, P2PFailed

OVERRIDE = "SWARM_P2PD_SHA256"  # or p2pd_sha256 in swarm.toml
PINNED = {  # hivemind 1.1.12: SHA-256 of hivemind/hivemind_cli/p2pd in each of its wheels
    ("linux", "x86_64"): "42f8f48e62583b97cdba3c31439c08029fb2b9fc506b5bdd82c46b7cc1d279d8",
    ("linux", "aarch64"): "046f18480c785a84bdf139d7486086d379397ca106cb2f0191598da32f81447a",
    ("darwin", "x86_64"): "fe00f9d79e8e4e4c007144d19da10b706c84187b3fb84de170f4664c91ecda80",
    ("darwin", "arm64"): "0404981a9c2b7cab5425ead2633d006c61c2c7ec85ac564ef69413ed470e65bd",
}


def check_program(path: Path, allowed: str | None = None) -> None:
    """Raise P2PFailed unless the program is the one that this platform may start.

    allowed: SHA-256 of another program that the user trusts, 64 hex digits; it takes the pinned one's place.
    Raises BadConfiguration when there is no such file.
    """
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadConfiguration(f"p2pd {path}", error.strerror or str(error)) from None
    wanted = allowed or PINNED.get((sys.platform, platform.machine()))
    if found != wanted:
        raise P2PFailed(
            f"{path} has SHA-256 {found}, not {wanted or 'one that is known for this platform'}; install the hivemind "
            f"of constraints.txt, or, if this p2pd is one that you trust, set {OVERRIDE}={found}"
        )
