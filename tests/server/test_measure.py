"""What a server measures of its span, on a clock that only computing moves."""

import pytest
import torch

from swarm.dht.records import RECORD, check_printable
from swarm.server.measure import MeasureLimits, device_name, measure_throughput

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


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("model name\t: Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz\n", "Intel Xeon E5-2680 v4"),
        ("processor\t: 0\nmodel name\t: AMD EPYC 7B13\nmodel name\t: AMD EPYC 7B13\n", "AMD EPYC 7B13"),
        (f"model name\t: {'x' * 100}\n", "x" * 20),
    ],
)
def test_a_processor_is_announced_with_the_kernels_that_it_gets(tmp_path, told, name):
    facts = tmp_path / "cpuinfo"
    facts.write_text(told)
    got = device_name(torch.device("cpu"), facts)
    kernels = f", {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__.split('+')[0]}"
    assert got.startswith(name)
    assert got.endswith(kernels)
    assert len(got) <= RECORD.device_chars
    assert check_printable(got) == got


def test_a_processor_without_a_name_is_a_cpu(tmp_path):
    assert device_name(torch.device("cpu"), tmp_path / "nothing") == "cpu"
    (tmp_path / "cpuinfo").write_text("Processor : of another kind\n")
    assert device_name(torch.device("cpu"), tmp_path / "cpuinfo") == "cpu"
    assert device_name(torch.device("mps"), tmp_path / "cpuinfo") == "mps"
