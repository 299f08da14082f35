"""Attention that gives a position the same bits in whatever pieces a prompt comes.

Kernels choose how they add up by the number of rows and of keys. In float32 that changes the last bits; where
activations are rounded to integers, such a bit moves some of them by a whole step. So spans with integer weights attend
in blocks of positions that begin at multiples of 32. A block always has 32 rows, some of them empty, and
ends with the keys of its own positions. It begins with the past's first key, or with the multiple of 32 before the
first one that its window shows. So shapes depend on positions alone. Single positions behind a past attend as ever:
in a batch they have the same bits as alone.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from swarm.model.growing import BLOCK_TOKENS
from swarm.model.probe import replace_attention
from swarm.model.span import Span

ALIGNED, ALIGNED_EAGER = "swarm_aligned", "swarm_aligned_eager"  # attention implementations
Attention = Callable[..., tuple[Tensor, Any]]


def align(span: Span) -> None:
    """Have a span with integer weights attend in blocks, if its family attends by functions that can be replaced."""
    if span.device.type != "cpu":
        return
    span.shared.aligned = True  # caches, too
    changes = {"sdpa": ALIGNED, "eager": ALIGNED_EAGER}
    tolerance = 0.02  # of a norm: last bits move some activations by a step of their integers
    span.shared.aligned = any([replace_attention(span, old, new, tolerance) for old, new in changes.items()])


def aligned_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    step: Attention = sdpa_attention_forward,
    **kwargs: Any,  # noqa: ANN401 - as all attention functions
) -> tuple[Tensor, None]:
    """Attend in blocks. query: [batch, heads, tokens, size], of the last positions of key and value.

    key and value begin with position 0, or a multiple of 32. step: the attention of single positions, and of what no
    blocks are made of. Returns [batch, tokens, heads, size].
    """
    others = (kwargs.get("position_bias"), kwargs.get("softcap"), kwargs.get("s_aux"))
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    tells_all = is_causal if attention_mask is None else attention_mask.dtype is torch.bool
    if query.shape[2] == 1 or not tells_all or any(other is not None for other in others):
        return step(module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    # Heads that share keys attend by themselves: a copy of the keys for each would be several times a long past.
    parts = key.shape[1] if query.shape[1] > key.shape[1] else 1

    def attend(queries: Tensor, keys: Tensor, values: Tensor, shown: Tensor) -> Tensor:
        outputs = []
        for own, *shared in zip(*(states.chunk(parts, dim=1) for states in (queries, keys, values)), strict=True):
            keys, values = (states.expand(-1, own.shape[1], -1, -1) for states in shared)
            output = nn.functional.scaled_dot_product_attention(own, keys, values, attn_mask=shown, scale=scaling)
            outputs.append(output.transpose(1, 2))
        return torch.cat(outputs, dim=2)

    return _in_blocks(attend, query, key, value, attention_mask, kwargs.get("sliding_window")), None


def aligned_eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,  # noqa: ANN401 - as all attention functions
) -> tuple[Tensor, Any]:
    """Do the same by the family's own eager attention, as where scores have a soft cap."""
    eager: Attention = getattr(sys.modules[type(module).__module__], "eager_attention_forward")  # noqa: B009 - checked
    if query.shape[2] == 1 or attention_mask is None or not attention_mask.is_floating_point():
        return eager(module, query, key, value, attention_mask, **kwargs)

    def attend(*states: Tensor) -> Tensor:
        return eager(module, *states, **kwargs)[0]

    return _in_blocks(attend, query, key, value, attention_mask, kwargs.get("sliding_window")), None


def _in_blocks(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    window: int | None,
) -> Tensor:
    """Attend to one block of queries after the other. mask: True, or 0, where a key is shown; None is causal."""
    tokens, length = query.shape[2], key.shape[2]
    past = length - tokens
    first, end = past // BLOCK_TOKENS * BLOCK_TOKENS, -(-length // BLOCK_TOKENS) * BLOCK_TOKENS
    before, behind = past - first, end - length
    queries = nn.functional.pad(query, (0, 0, before, behind))
    if mask is None:
        shown = torch.ones(end - first, end, dtype=torch.bool, device=query.device).tril(first)[None, None]
    else:
        is_bool = mask.dtype is torch.bool
        shown = nn.functional.pad(mask, (0, behind), value=False if is_bool else torch.finfo(mask.dtype).min)
        shown = nn.functional.pad(shown, (0, 0, before, behind), value=is_bool)  # a softmax of no key is no number
    outputs = []
    for start in range(first, end, BLOCK_TOKENS):
        stop = start + BLOCK_TOKENS
        since = 0 if window is None else max(0, (start - window + 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        rows, columns = slice(start - first, stop - first), slice(since, stop)
        keys, values = (states[:, :, columns] for states in (key, value))
        if stop > length:
            keys, values = (nn.functional.pad(states, (0, 0, 0, behind)) for states in (keys, values))
        outputs.append(attend(queries[:, :, rows], keys, values, shown[:, :, rows, columns]))
    return torch.cat(outputs, dim=1)[:, before : before + tokens].contiguous()


AttentionInterface.register(ALIGNED, aligned_attention)
AttentionInterface.register(ALIGNED_EAGER, aligned_eager_attention)
AttentionMaskInterface.register(ALIGNED, sdpa_mask)
AttentionMaskInterface.register(ALIGNED_EAGER, eager_mask)
