"""The table of limits in SECURITY.md has the numbers that the code has."""

from pathlib import Path

from swarm.compute import batch
from swarm.dht import records, search, storage
from swarm.net.limits import ChannelLimits, ListenerLimits
from swarm.protocol import messages, tensors
from swarm.server import accounts, handler, server, session

SECURITY = Path(__file__).parent.parent / "SECURITY.md"
KIB, MIB = 1 << 10, 1 << 20
CHANNEL, LISTENER = ChannelLimits(), ListenerLimits()
FRAMES, READING, KEEPALIVES, HANDSHAKES = CHANNEL.frames, CHANNEL.reading, CHANNEL.keepalives, LISTENER.handshakes
LIMITS = {
    "a frame |": (
        f"{tensors.TENSOR_BYTES_MAX // MIB} MiB",
        f"{FRAMES.hello_bytes_max // KIB} KiB before",
        f"{FRAMES.timeout_s:.0f} seconds",
    ),
    "frames of one channel": (f"{FRAMES.turn:.0f},",),
    "messages that move no session": (
        f"{READING.idle_per_s:.0f} a second and peer",
        f"{READING.all_idle_per_s:.0f} a second of all",
    ),
    "bytes read": (
        f"{READING.bytes_per_s / KIB:.0f} KiB a second",
        f"{READING.step_bytes_free / KIB:.0f} KiB of every decode step",
        f"{server.INFLOW_LEAST / MIB:.0f} MiB a second at least",
        f"({READING.all_bytes_per_s / MIB:.0f} before",
    ),
    "signs of life": (f"{KEEPALIVES.every_s} seconds", f"{KEEPALIVES.all_per_s:,.0f} a second"),
    "bytes held": (f"{FRAMES.held_bytes_max // MIB} MiB",),
    "a peer that takes nothing": (f"after {LISTENER.sweep_s:.0f} to {2 * LISTENER.sweep_s:.0f} seconds",),
    "unproven": (
        f"{HANDSHAKES.unproven_max},",
        f"{HANDSHAKES.timeout_s:.0f} seconds",
        f"the {HANDSHAKES.turn_wait_s:.0f} that they may wait",
    ),
    "handshakes |": (
        f"{HANDSHAKES.per_s:.0f} a second from one source ({HANDSHAKES.burst:.0f} at once)",
        f"{HANDSHAKES.all_per_s:.0f} from all",
        f"{LISTENER.accepts_per_s:.0f} a second",
    ),
    "channels |": (
        f"{LISTENER.channels_max:,},",
        f"{LISTENER.channels_per_process_max} for one process",
        f"{LISTENER.channels_per_peer_max} for one peer",
        f"{LISTENER.idle_s / 60:.0f} minutes",
    ),
    "a message's header": (f"{messages.HEADER_BYTES_MAX // KIB} KiB",),
    "sessions |": (f"{handler.SESSIONS_MAX:,};",),
    "openings and reroutes": (
        f"{accounts.OPENINGS_PER_S:.0f} a second and peer ({accounts.OPENINGS_BURST:.0f} at once)",
        f"{accounts.ALL_OPENINGS_PER_S:.0f} of all",
    ),
    "steps, bytes of activations": (
        f"{accounts.STEPS_PER_S:,.0f} and",
        f"{accounts.BYTES_PER_S / MIB:.0f} MiB a second",
    ),
    "outputs that their owner has not read": (
        f"{handler.UNREAD_BYTES_MAX // MIB} MiB; {handler.NEXT_UNSENT_MAX // MIB} MiB",
    ),
    "steps of one session": (f"{session.WINDOW_STEPS}; {messages.ROWS_MAX}",),
    "steps that can run with no others": (f"{batch.UNNOTICED_S * 1000:.0f} ms",),
    "a step |": (f"{session.STEP_BYTES_MAX // MIB} MiB",),
    "a grant |": (f"{messages.LIFETIME_S_MAX // 3600} hours",),
    "a session without steps": (f"{handler.SESSION_IDLE_S / 60:.0f} minutes",),
    "activations that wait": (f"{handler.INPUT_BYTES_MAX // MIB} MiB",),
    "pasts that are being rebuilt": (f"of {handler.INPUT_BYTES_MAX // MIB} MiB",),
    "outputs kept in case": (f"{handler.OUTPUT_BYTES_MAX // MIB} MiB",),
    "a record, records": (
        f"{records.RECORD_BYTES_MAX:,} bytes, {storage.SUBKEYS_MAX}, {storage.BYTES_MAX // MIB} MiB",
    ),
    "nodes asked": (f"{search.ASKED_MAX}, {search.CALLS_MAX}",),
}


def test_the_limits_that_are_written_down_are_those_of_the_code() -> None:
    table = SECURITY.read_text().split("\n## Limits\n")[1].split("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    for starts, says in LIMITS.items():
        (line,) = (line for line in lines if line.startswith(f"| {starts}"))
        assert [text for text in says if text not in line] == [], line
