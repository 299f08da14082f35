"""Numbers and times as people read them. Pure; each is a filter of the page's templates."""

from datetime import UTC, datetime

NOT_KNOWN = "\N{EN DASH}"
_NBSP = "\N{NO-BREAK SPACE}"  # keeps a number and its unit on one line


def rate(tps: float | None) -> str:
    """Say a throughput: 7.25 -> "7.2 tok/s", 12345.0 -> "12.3k tok/s"; None was not measured."""
    return NOT_KNOWN if tps is None else f"{figure(tps)}{_NBSP}tok/s"


def figure(value: float | None) -> str:
    """Say a number in about three digits: 7.25 -> "7.2", 950.4 -> "950", 8192 -> "8,192", 12345 -> "12.3k"."""
    if value is None:
        return NOT_KNOWN
    for unit, size, least in (("G", 1e9, 0.9995e9), ("M", 1e6, 0.9995e6), ("k", 1e3, 9.9995e3)):
        if value >= least:
            return f"{_short(value / size)}{unit}"
    return f"{value:,.0f}" if value >= 1000 else _short(value)


def bandwidth(bytes_per_s: float) -> str:
    """Say bytes per second: 0 -> "0 kB/s", 120000 -> "120 kB/s", 4194304 -> "4.2 MB/s"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if bytes_per_s >= 0.9995 * size:
            return f"{figure(bytes_per_s / size)}{_NBSP}{unit}/s"
    return f"{figure(bytes_per_s / 1e3)}{_NBSP}kB/s"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}".removesuffix(".0")


def share(value: float | None) -> str:
    """Say a share in percent. Only all of it is 100 %: 0.9999 -> "99.9 %"."""
    if value is None:
        return NOT_KNOWN
    percent = int(value * 1000) / 10 if value < 1 else 100.0
    return f"{percent:.0f}{_NBSP}%" if percent == int(percent) else f"{percent:.1f}{_NBSP}%"


def span(blocks: tuple[int, int]) -> str:
    """Say a range of blocks: (20, 40) -> "20:40"."""
    return f"{blocks[0]}:{blocks[1]}"


def took(ms: float | None) -> str:
    """Say a short time: 410 -> "410 ms", 1240 -> "1.2 s"."""
    if ms is None:
        return NOT_KNOWN
    return f"{ms:.0f}{_NBSP}ms" if ms < 999.5 else f"{ms / 1000:.1f}{_NBSP}s"


def lasting(seconds: float | None) -> str:
    """Say a longer time in one unit: 59 -> "59 s", 4000 -> "1 h"."""
    if seconds is None:
        return NOT_KNOWN
    minute, hour, day = 60, 3600, 86400
    if seconds < 2 * minute:
        return f"{seconds:.0f}{_NBSP}s"
    if seconds < 2 * hour:
        return f"{seconds // minute:.0f}{_NBSP}min"
    if seconds < 2 * day:
        return f"{seconds // hour:.0f}{_NBSP}h"
    return f"{seconds // day:.0f}{_NBSP}days"


def moment(at: float) -> str:
    """Say a wall time: "21 Nov 2026, 05:22 UTC"."""
    return f"{datetime.fromtimestamp(at, UTC):%-d %b %Y, %H:%M} UTC"


def machine(at: float) -> str:
    """Write a wall time for the attribute of a <time>."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"


def plural(count: int, noun: str) -> str:
    """Count things: (1, "server") -> "1 server", (2000, "server") -> "2,000 servers"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


FILTERS = {
    function.__name__: function
    for function in (rate, figure, bandwidth, share, span, took, lasting, moment, machine, plural)
}
