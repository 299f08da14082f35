"""The scheduler's limits."""

from dataclasses import dataclass

from swarm.limits import limit


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How large the parts of a batch may be."""

    odd_turns: int = limit(1, "iterations", "in a row of sessions that do not pack with most others; then these run")
    decode_tokens_max: int = limit(
        512, "tokens", "decode steps beyond it wait for the next batch: no token gets faster"
    )
    single_tokens_max: int = limit(
        32, "tokens", "of all rows: a larger step is planned as prefill, because others would wait for it"
    )
    window_tokens_max: int = limit(16, "tokens", "of each row, behind a past: a longer step is planned as prefill")
    piece_tokens_min: int = limit(16, "tokens", "peers' shares are no smaller: each piece has a cost of its own")
    debt_tokens_max: int = limit(
        512, "tokens", "prefill beyond its budgets is repaid by later iterations, no more of it"
    )

    def decodes(self, rows: int, tokens: int, *, has_past: bool) -> bool:
        """Whether a step of so many tokens of each row is decode work, which does not wait for a prefill budget.

        has_past: whether the session has positions before it. Without them only a step of one token is.
        """
        longest = self.window_tokens_max if has_past else 1
        return tokens <= longest and rows * tokens <= self.single_tokens_max


@dataclass(frozen=True, slots=True)
class CostLimits:
    """How much prefill may cost the sessions that decode, and how fast costs are learned."""

    prefill_tokens_unknown: int = limit(512, "tokens", "a budget before the model's speed is known")
    stretch: float = limit(0.25, "of an iteration", "prefill beside decode steps adds no more")
    unnoticed_s: float = limit(0.018, "s", "an iteration may be this long: a quarter of a quick one pays for no piece")
    alone_s: float = limit(0.2, "s", "an iteration of prefill alone: a step that comes meanwhile waits for its end")
    own_s: float = limit(0.1, "s", "a peer's own waiting prompts make iterations with its steps no longer than this")
    bare_every: int = limit(16, "iterations", "one of so many runs without prefill, to learn the cost of decode")
    smoothing: float = limit(0.2, "weight", "of the newest measurement")
    outlier: float = limit(1.5, "times", "a longer measurement than so many times the expected one is cut to it")
    retry_first: int = limit(8, "iterations", "until a size that took too long is tried again")
    retry_last: int = limit(512, "iterations", "the same after several tries; each pause is four times the one before")


@dataclass(frozen=True, slots=True)
class LingerLimits:
    """How long work waits for sessions that are expected back."""

    step_s: float = limit(0.010, "s", "a decode step waits no longer for others")
    step_share: float = limit(0.4, "of the last iteration", "a decode step waits no longer for others")
    prefill_s: float = limit(0.050, "s", "prefill waits no longer for steps, nor longer than the last iteration")
    prefill_min_s: float = limit(0.005, "s", "prefill may wait so long however short the last iteration was")
    absent_s: float = limit(1.0, "s", "a session that is away for longer is not expected back")
    smoothing: float = limit(0.5, "weight", "of the newest absence: prefill that begins too early delays the next step")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """All limits of a scheduler."""

    batch: BatchLimits = BatchLimits()
    costs: CostLimits = CostLimits()
    linger: LingerLimits = LingerLimits()
    prefills_seen: int = limit(64, "queues", "of all peers together, when an iteration is planned; the others wait")
    peers_remembered: int = limit(4096, "peers", "beyond it only peers with waiting tasks keep their turn")
    failures_max: int = limit(3, "batches", "in a row that fail as a whole; then the device itself is tried")
    watch_s: float = limit(1.0, "s", "between looks at the compute thread: a dead one is noticed so soon")
    stuck_s: float = limit(8.0, "s", "of looks at one batch, and the thread counts as stuck; a slow one has longer")
    stuck_times: float = limit(100.0, "times", "as long as the longest of late: a batch may take that")
    stuck_token_times: float = limit(4.0, "times", "the slowest token of late: a batch may take that for each")
    first_s: float = limit(3.0, "s", "counts as the longest batch at first: kernels may be compiled")
