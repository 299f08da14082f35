"""Speaks UPnP-IGD with one router, by miniupnpc: run as a script, one request as JSON, one answer as JSON.

It is C code that reads a stranger's HTTP and XML without a bound on either. So it runs in this process, which has
limits (`swarm/net/launch.py`) and is killed when it takes too long, and whose end ends nothing else. It imports nothing
of the swarm, because the interpreter starts anew for each request.
"""

import json
import sys
from typing import Any

PERMANENT_ONLY, CONFLICT = "OnlyPermanentLeasesSupported", "ConflictInMappingEntry"  # strupnperror()


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Return what came of it, or {"why": text}.

    url: of the router's description. host: the router's, the only one that is spoken with. unmap: a port, or null.
    internal, external, lease_s: of the port to map. spare: external ports that are as good.
    """
    try:
        import miniupnpc  # noqa: PLC0415 - not for every platform
    except ImportError:
        return {"why": "miniupnpc is not installed"}
    router = miniupnpc.UPnP()
    try:
        control = router.selectigd(request["url"])
        if not control.startswith((f"http://{request['host']}:", f"http://{request['host']}/")):
            return {"why": "its controls are on another machine"}
        if request["unmap"] is not None:
            router.deleteportmapping(request["unmap"], "TCP")
            return {}
        host = router.externalipaddress()
        external = add(router, request)
    except Exception as error:  # noqa: BLE001 - it has no class of its own
        return {"why": str(error)[:200]}
    return {"host": host, "port": external}


def add(router: Any, request: dict[str, Any]) -> int:  # noqa: ANN401 - of C
    """Add the mapping, at another port if another machine has this one, for ever if the router knows no leases."""
    internal, lease_s = request["internal"], request["lease_s"]
    for external in (request["external"], *request["spare"]):
        taken = router.getspecificportmapping(external, "TCP")  # some routers give it to the last who asks
        if taken is not None and taken[:2] != (router.lanaddr, internal):
            continue
        try:
            try:
                router.addportmapping(external, "TCP", router.lanaddr, internal, "swarm", "", lease_s)
            except Exception as error:
                if str(error) != PERMANENT_ONLY:
                    raise
                router.addportmapping(external, "TCP", router.lanaddr, internal, "swarm", "", 0)
        except Exception as error:
            if str(error) != CONFLICT:
                raise
            continue
        return int(external)
    raise LookupError("other machines have all ports that were tried")


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
