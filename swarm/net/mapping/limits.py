"""The bounds on asking a router for ports."""

from dataclasses import dataclass

from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class MappingLimits:
    """Of mapping ports at the router."""

    ports_max: int = limit(8, "ports", "that one caller may have mapped")
    probe_s: float = limit(1.5, "s", "a router that speaks no protocol by then counts as one that maps nothing")
    resend_s: tuple[float, ...] = limit((0.25, 0.5), "s", "after which an unanswered datagram is sent again")
    map_s: float = limit(4.0, "s", "for one port; a router that takes longer has refused")
    unmap_s: float = limit(2.0, "s", "at the end; what is not removed by then stays until its lease ends")
    lease_s: int = limit(3600, "s", "of forwarding that are asked for")
    lease_s_min: int = limit(60, "s", "a shorter lease counts as a refusal")
    look_s: float = limit(10.0, "s", "between looks at the default gateway; another one is asked at once")
    renew_s: float = limit(120.0, "s", "between renewals, or half a lease; a restarted router forgets its mappings")
    retry_s: float = limit(10.0, "s", "until a failed renewal is tried again")
    failures_max: int = limit(3, "renewals", "that fail in a row; then the ports count as lost")
    again_s: float = limit(300.0, "s", "until a router that maps nothing is asked again")
    spare_ports: int = limit(3, "ports", "tried by UPnP, at random, where another machine has the port")
    answer_bytes_max: int = limit(2048, "bytes", "of a router's datagram; a longer one is malformed")
    child_bytes_max: int = limit(64 << 20, "bytes", "RLIMIT_DATA of the child that speaks UPnP")
    child_descriptors_max: int = limit(64, "descriptors", "RLIMIT_NOFILE of that child")
    child_answer_bytes_max: int = limit(4096, "bytes", "that the child may print; more is malformed")
