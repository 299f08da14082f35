"""Bounds on distilling a draft head."""

from dataclasses import dataclass

from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class DistilLimits:
    """How much is read, kept and computed at a time."""

    files_max: int = limit(100_000, "files", "a folder with more texts is refused")
    file_bytes_max: int = limit(16 << 20, "bytes", "the rest of a larger text is not read")
    step_bytes_max: int = limit(16 << 20, "bytes", "of hidden states travel in one request, or one window alone")
    step_rows_max: int = limit(16, "windows", "travel in one request")
    logits_max: int = limit(1 << 25, "numbers", "one training step compares some positions only, where all are more")
    free_bytes_min: int = limit(1 << 30, "bytes", "of the disk stay free, or nothing is begun")
    save_s: float = limit(60.0, "s", "of training are lost at most when the process is killed")
    held_out: float = limit(1 / 32, "", "share of the windows that shows how often the head is right")
    held_out_max: int = limit(64, "windows", "more show no more")
