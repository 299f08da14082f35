"""What a server measures of its span, on a clock that only computing moves."""

import torch

from swarm.server.measure import MeasureLimits, measure_throughput

COLD_S, PREFILL_S, STEP_S = 3.0, 0.5, 0.01
LIMITS = MeasureLimits()


class Computes:
    """A span that takes so long for a prompt, more for the first one, and for a step."""

    hidden_size, dtype, device = 8, torch.float32, torch.device("cpu")

    def __init__(self):
        self.now, self.pasts = 0.0, []

    def new_cache(self):
        self.pasts.append([])
        return self.pasts[-1]

    def forward(self, hidden, *, cache):
        tokens = hidden.shape[1]
        self.now += STEP_S if tokens == 1 else PREFILL_S if len(self.pasts) > 1 else COLD_S
        cache.append(tokens)
        return hidden


def test_what_only_the_first_prompt_costs_is_not_announced():
    span = Computes()
    measured = measure_throughput(span, lambda: span.now)
    assert (measured.prefill_tps, measured.decode_tps) == (LIMITS.prefill_tokens / PREFILL_S, 1 / STEP_S)
    assert span.pasts == [[LIMITS.prefill_tokens], [LIMITS.prefill_tokens, *[1] * LIMITS.decode_steps]]
