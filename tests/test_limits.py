"""The table of limits in SECURITY.md has the numbers that the code has."""

from pathlib import Path

from swarm.compute import batch
from swarm.dht import records, search, storage
from swarm.net import buffers, channel, tcp
from swarm.protocol import messages, tensors
from swarm.server.server import ServerLimits

SECURITY = Path(__file__).parent.parent / "SECURITY.md"
KIB, MIB = 1 << 10, 1 << 20
SERVER = ServerLimits()
SESSION, ACCOUNTS = SERVER.handler.session, SERVER.handler.accounts
LIMITS = {
    "a frame |": (
        f"{tensors.TENSOR_BYTES_MAX // MIB} MiB",
        f"{channel.HELLO_BYTES_MAX // KIB} KiB before",
        f"{channel.FRAME_TIMEOUT_S:.0f} seconds",
    ),
    "frames of one channel": (f"{channel.TURN_FRAMES},",),
    "messages that move no session": (
        f"{channel.CHATTER_PER_S:.0f} a second and peer",
        f"{channel.ALL_CHATTER_PER_S:.0f} a second of all",
    ),
    "bytes read": (
        f"{channel.BYTES_PER_S / KIB:.0f} KiB a second",
        f"{channel.STEP_BYTES / KIB:.0f} KiB of every decode step",
        f"{SERVER.inflow_bytes_per_s_min / MIB:.0f} MiB a second at least",
        f"({channel.ALL_BYTES_PER_S / MIB:.0f} before",
    ),
    "signs of life": (f"{channel.SIGN_S} seconds", f"{channel.ALL_SIGNS_PER_S:,.0f} a second"),
    "bytes held": (f"{buffers.HELD_BYTES_MAX // MIB} MiB",),
    "a peer that takes nothing": (f"after {tcp.SWEEP_S:.0f} to {2 * tcp.SWEEP_S:.0f} seconds",),
    "unproven": (
        f"{tcp.HANDSHAKES_MAX},",
        f"{tcp.HANDSHAKE_TIMEOUT_S:.0f} seconds",
        f"the {tcp.TURN_WAIT_S:.0f} that they may wait",
    ),
    "handshakes |": (
        f"{tcp.HANDSHAKES_PER_S:.0f} a second from one source ({tcp.HANDSHAKES_BURST:.0f} at once)",
        f"{tcp.ALL_HANDSHAKES_PER_S:.0f} from all",
        f"{tcp.ACCEPTS_PER_S:.0f} a second",
    ),
    "channels |": (
        f"{tcp.CHANNELS_MAX:,},",
        f"{tcp.CHANNELS_PER_PROCESS_MAX} for one process",
        f"{tcp.CHANNELS_PER_PEER_MAX} for one peer",
        f"{tcp.IDLE_S / 60:.0f} minutes",
    ),
    "a message's header": (f"{messages.HEADER_BYTES_MAX // KIB} KiB",),
    "sessions |": (f"{SERVER.handler.admission.sessions_max:,};",),
    "openings and reroutes": (
        f"{ACCOUNTS.openings_per_s:.0f} a second and peer ({ACCOUNTS.openings_burst:.0f} at once)",
        f"{ACCOUNTS.all_openings_per_s:.0f} of all",
    ),
    "steps, bytes of activations": (
        f"{ACCOUNTS.steps_per_s:,.0f} and",
        f"{ACCOUNTS.bytes_per_s / MIB:.0f} MiB a second",
    ),
    "outputs that their owner has not read": (
        f"{SESSION.unread_bytes_max // MIB} MiB; {SESSION.next_unread_bytes_max // MIB} MiB",
    ),
    "steps of one session": (f"{SESSION.inbox.window_steps}; {messages.ROWS_MAX}",),
    "steps that can run with no others": (f"{batch.UNNOTICED_S * 1000:.0f} ms",),
    "a step |": (f"{SESSION.step_bytes_max // MIB} MiB",),
    "a grant |": (f"{messages.LIFETIME_S_MAX // 3600} hours",),
    "a session without steps": (f"{SESSION.idle_s / 60:.0f} minutes",),
    "activations that wait": (f"{SERVER.memory.input_bytes_max // MIB} MiB",),
    "pasts that are being rebuilt": (f"of {SERVER.memory.window_bytes_max // MIB} MiB",),
    "outputs kept in case": (f"{SERVER.memory.output_bytes_max // MIB} MiB",),
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
