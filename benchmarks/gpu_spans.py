"""Spans of random weights for `gpu_check.py`: the server's own classes, on any device and in any dtype."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from swarm.blocks import Blocks
from swarm.model.checkpoint import Checkpoint, open_checkpoint
from swarm.model.hollow import hollow_class
from swarm.model.kernels import leave_out_planned_attention
from swarm.model.loading import load_span
from swarm.model.probe import check_span, prove_direct_path, prove_packing
from swarm.model.span import Span
from swarm.model.traits import traits_of
from tests.families import make


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of everything that is computed."""

    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    blocks: int = 8
    compared_blocks: int = 2  # of the wide model, beside its float32 twin on the CPU
    compared_pasts: tuple[int, ...] = (17, 130, 300)
    families: tuple[str, ...] = ("llama", "qwen3_moe", "gemma3_text", "deepseek_v3", "qwen3_next", "lfm2")
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    speed_dtype: torch.dtype = torch.bfloat16
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    pasts: tuple[int, ...] = (128, 2048)
    prompts: tuple[int, ...] = (512, 2048)
    overhead_batches: tuple[int, ...] = (1, 8, 32)
    steps: int = 20  # timed, of each kind
    graphs_s: float = 20.0  # of the budget that families leave to graphs
    copy_bytes: int = 2 << 30
    matmul: int = 8192

    @classmethod
    def small(cls) -> "Sizes":
        """What a CPU computes in a minute."""
        return cls(
            hidden=256,
            intermediate=512,
            heads=8,
            kv_heads=2,
            blocks=4,
            compared_pasts=(5, 40, 70),
            dtypes=(torch.float32, torch.bfloat16),
            speed_dtype=torch.float32,
            batches=(1, 2, 4),
            pasts=(32, 128),
            prompts=(64, 128),
            overhead_batches=(1, 4),
            steps=8,
            copy_bytes=64 << 20,
            matmul=512,
        )

    @classmethod
    def quick(cls) -> "Sizes":
        """What shows within seconds that all of it runs."""
        return cls(
            hidden=64,
            intermediate=96,
            heads=4,
            kv_heads=2,
            blocks=2,
            compared_pasts=(3, 9),
            families=("llama", "gemma3_text"),
            dtypes=(torch.float32,),
            speed_dtype=torch.float32,
            batches=(1, 2),
            pasts=(8,),
            prompts=(16,),
            overhead_batches=(1, 2),
            steps=3,
            copy_bytes=1 << 20,
            matmul=64,
        )


@dataclass(slots=True)
class Bench:
    """What all sections share: the device, the sizes, the seed, and the time that is left."""

    device: torch.device
    sizes: Sizes
    seed: int
    deadline: float  # as `time.perf_counter`
    facts: dict[str, float] = field(default_factory=dict)  # measured by one section, read by later ones

    @property
    def late(self) -> bool:
        """Whether the budget is used up."""
        return self.left_s <= 0

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.deadline - time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def times_ms(self, work: Callable[[], object], rounds: int, warm: int = 2) -> list[float]:
        """Run `work` some times and then `rounds` times more. Returns the milliseconds of each of those."""
        for _ in range(warm):
            work()
        found = []
        for _ in range(rounds):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            found.append(1000 * (time.perf_counter() - began))
        return found

    def median_ms(self, work: Callable[[], object], rounds: int) -> float:
        """The median of `times_ms`."""
        return median(self.times_ms(work, rounds))

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(text, flush=True)


@contextmanager
def tiny_checkpoint(family: str, seed: int) -> Iterator[Checkpoint]:
    """A float32 checkpoint of a family with 6 small blocks, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="swarm-gpu-") as folder:
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(make(family)).save_pretrained(folder)
        yield open_checkpoint(Path(folder))


def tiny_span(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Span:
    """The blocks 1 to 5, loaded as a server loads them."""
    return load_span(checkpoint, Blocks(1, 5), dtype=dtype, device=device)


def wide_config(sizes: Sizes, blocks: int) -> PretrainedConfig:
    """A llama of a real width."""
    return AutoConfig.for_model(
        "llama",
        vocab_size=128,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=blocks,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=16384,
        rms_norm_eps=1e-5,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )


def wide_span(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device | str, seed: int, like: Span | None = None
) -> Span:
    """All blocks of a wide model, with random weights made on the device, or with those of another span."""
    leave_out_planned_attention(torch.device(device))  # as `load_span` does
    blocks = Blocks(0, config.num_hidden_layers)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as `from_pretrained` does, so that tables that are always float32 stay so
    try:
        with torch.device(device):
            model = hollow_class(config, blocks)(config).eval()
    finally:
        torch.set_default_dtype(default)
    if like is not None:
        model.load_state_dict(like.model.state_dict())
    else:
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.normal_(std=weight.shape[1] ** -0.5)  # every block adds as much as it got
    span = Span.of(model, traits_of(config), blocks)
    check_span(span)
    prove_direct_path(span)
    prove_packing(span)
    return span


def noise(span: Span, tokens: int, seed: int, rows: int = 1) -> Tensor:
    """Hidden states [rows, tokens, hidden_size] in the span's dtype, the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, tokens, span.hidden_size, generator=generator).to(span.dtype).to(span.device)


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def parted(hidden: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Cut hidden states into consecutive pieces of so many tokens."""
    return list(hidden[:, : sum(counts)].split(list(counts), dim=1))
