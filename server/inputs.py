"""Whether activations are of a shape and of numbers that a span can compute."""

import torch
from torch import Tensor

from swarm.activations import Activations
from swarm.model.span import Span
from swarm.protocol.messages import POSITIONS_MAX, ROWS_MAX
from swarm.protocol.tensors import CHUNK_BYTES, TENSOR_BYTES_MAX
from swarm.server.refusals import Declined


def objection(activations: Activations, span: Span, step_bytes_max: int) -> Declined | None:
    """Return why a span cannot compute these. step_bytes_max: of hidden states of more than one token.

    The rank is looked at first: rows and tokens are no more than the first two of three dimensions.
    """
    hidden, positions, mask = activations.hidden, activations.positions, activations.mask
    # Some families add up residuals in fp32 between bf16 blocks, so any floating dtype may come.
    if hidden.dim() != 3 or hidden.shape[2] != span.hidden_size or not hidden.dtype.is_floating_point:
        return Declined("bad_activations", f"activations of shape {list(hidden.shape)} and {hidden.dtype}")
    rows, tokens, _ = hidden.shape
    too_long = hidden.nbytes > step_bytes_max and tokens > 1
    if too_long or rows > ROWS_MAX or 4 * hidden.numel() > TENSOR_BYTES_MAX:  # an output in fp32 must fit into a frame
        return _too_large(rows, hidden.nbytes if too_long else 0)
    if positions is not None and (declined := _bad_positions(positions, rows, tokens, span)):
        return declined
    if mask is not None and (declined := _bad_mask(mask, rows, tokens)):
        return declined
    if not activations.is_finite():
        return Declined("bad_activations", "activations that are infinite or no numbers")
    return None


def _too_large(rows: int, too_many_bytes: int) -> Declined:
    if rows > ROWS_MAX:
        return Declined("bad_request", f"{rows} rows, a session has {ROWS_MAX} at most")
    if too_many_bytes:
        return Declined("bad_request", f"a step of {too_many_bytes} bytes; cut it into parts of {CHUNK_BYTES}")
    return Declined("bad_request", f"{rows} rows are too many for this model")


def _bad_positions(positions: Tensor, rows: int, tokens: int, span: Span) -> Declined | None:
    """Return why these position ids will not do.

    Ids out of range could index beyond a table, or rescale a rotary embedding that all sessions share.
    """
    if positions.dtype != torch.int64 or positions.shape not in {(1, tokens), (rows, tokens)}:
        return Declined("bad_request", f"position ids of shape {list(positions.shape)}")
    limit = span.traits.positions_max or POSITIONS_MAX
    first, last = (int(bound) for bound in positions.aminmax())
    if first < 0 or last >= limit:
        return Declined("bad_request", f"position ids from {first} to {last}, the model has 0 to {limit - 1}")
    return None


def _bad_mask(mask: Tensor, rows: int, tokens: int) -> Declined | None:
    if mask.dtype == torch.uint8 and mask.shape == (rows, tokens):
        return None
    return Declined("bad_request", f"attention mask of shape {list(mask.shape)}")
