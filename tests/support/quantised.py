"""Tiny checkpoints in the formats of others: each with a plain twin of the same numbers.

The tensors are written by hand, one number at a time where that is clearer, so that a mistake of the reader's is not
made here, too.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families import BASE, make

Tensors = dict[str, Tensor]
Made = tuple[Tensors, Tensor]  # a layer's tensors, by their names behind the layer's, and the weight [out, in]

GROUP = 32
NF4 = torch.linspace(-1, 1, 16) ** 3


def write(folder: Path, case: str, *, files: int = 2) -> Path:
    """Write a case's checkpoint into folder/quantised and its twin into folder/plain. Returns the first."""
    config, layer = cases()[case]
    family = make("gpt_oss") if case == "mxfp4" else AutoConfig.for_model("llama", **BASE)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(family)
    tensors = {name: tensor.contiguous().clone() for name, tensor in plain.state_dict().items()}
    twin = dict(tensors)
    for name, tensor in list(tensors.items()):
        if case == "mxfp4" and "experts" in name and tensor.dim() == 3:
            for part, made in mxfp4(tensor).items():
                tensors[name + part] = made
            del tensors[name], twin[name]
        elif case != "mxfp4" and "layers" in name and tensor.dim() == 2:
            del tensors[name]
            parts, twin[name] = layer(tensor.shape, torch.Generator().manual_seed(len(tensors)))
            tensors |= {f"{name.removesuffix('.weight')}.{part}": made.contiguous() for part, made in parts.items()}
    for place, these in (("quantised", tensors), ("plain", twin)):
        plain.config.save_pretrained(folder / place)
        spread(folder / place, these, files if place == "quantised" else 1)
    path = folder / "quantised" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return folder / "quantised"


def spread(folder: Path, tensors: Tensors, files: int) -> None:
    """Write the tensors to some files in turns, so that a layer's parts lie in several."""
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    places = {name: f"model-{number % files}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: tensors[name] for name, place in places.items() if place == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def cases() -> dict[str, tuple[dict[str, object], Callable[..., Made]]]:
    """Return each case's quantization_config, and what makes a layer."""
    return {
        "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}, gptq()),
        "gptq, asymmetric, in another order": (
            {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
            gptq(symmetric=False, ordered=False),
        ),
        "gptq of 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": GROUP}, gptq(8)),
        "gptq of 2 bits": ({"quant_method": "gptq", "bits": 2, "group_size": -1}, gptq(2, group=0)),
        "gptq, second version": (
            {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
            gptq(symmetric=False, less=0),
        ),
        "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq),
        "compressed-tensors W4A16": (compressed("pack-quantized", 4), packed(4)),
        "compressed-tensors W4A16, asymmetric, in another order": (
            compressed("pack-quantized", 4, symmetric=False, actorder="group"),
            packed(4, symmetric=False, ordered=False),
        ),
        "compressed-tensors W8A16": (compressed("pack-quantized", 8), packed(8)),
        "compressed-tensors W8A8": (compressed("int-quantized", 8), eight_bits),
        "compressed-tensors FP8": (compressed("float-quantized", 8, type="float"), floats(by="output")),
        "compressed-tensors FP8, in blocks": (
            compressed("float-quantized", 8, type="float", block_structure=[32, 32]),
            floats(by="block"),
        ),
        "fp8": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, floats("weight_scale_inv", by="block")),
        "fp8, one scale": ({"quant_method": "fp8", "weight_block_size": None}, floats("weight_scale_inv", by="tensor")),
        "bitsandbytes nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4()),
        "bitsandbytes nf4, nested": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4(nested=True)),
        "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8_bitsandbytes),
        "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "self_attn", "router"]}, nf4()),
    }


def compressed(format: str, bits: int, **weights: object) -> dict[str, object]:
    scheme = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


# Layers ---------------------------------------------------------------------------------------------------------------


def drawn(shape: torch.Size, bits: int, group: int, generator: torch.Generator, *, symmetric: bool, ordered: bool):
    """Draw codes [out, in], zero points and scales [out, groups], and each input's group; with the weight of them."""
    n_outputs, n_inputs = shape
    count = n_inputs // group if group else 1
    codes = torch.randint(0, 2**bits, (n_outputs, n_inputs), generator=generator)
    zeros = torch.randint(0, 2**bits, (n_outputs, count), generator=generator)
    if symmetric:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    scales = (0.02 + 0.1 * torch.rand(n_outputs, count, generator=generator)).half() / 2 ** (bits - 4)
    groups = torch.arange(n_inputs) // (group or n_inputs)
    if not ordered:
        groups = groups[torch.randperm(n_inputs, generator=generator)]
    weight = torch.stack(
        [(codes[:, i] - zeros[:, groups[i]]) * scales[:, groups[i]].double() for i in range(n_inputs)], dim=1
    )
    return codes, zeros, scales, groups, weight.float()


def words(codes: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """Pack [rows, n] into int32 [rows, n * bits / 32], the first one in the lowest bits."""
    per = 32 // bits
    order = order or list(range(per))
    filled = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per))
    total = torch.zeros(len(codes), filled.shape[1] // per, dtype=torch.int64)
    for place, number in enumerate(order):
        total |= filled[:, number::per] << (bits * place)
    return (total - ((total >> 31) << 32)).to(torch.int32)


def gptq(bits: int = 4, group: int = GROUP, *, symmetric: bool = True, ordered: bool = True, less: int = 1):
    def layer(shape: torch.Size, generator: torch.Generator) -> Made:
        codes, zeros, scales, groups, weight = drawn(
            shape, bits, group, generator, symmetric=symmetric, ordered=ordered
        )
        kept = (zeros - less) % 2**bits
        parts = {"qweight": words(codes, bits).t(), "qzeros": words(kept.t(), bits), "scales": scales.t()}
        return parts | {"g_idx": groups.int()}, weight

    return layer


def awq(shape: torch.Size, generator: torch.Generator) -> Made:
    codes, zeros, scales, _, weight = drawn(shape, 4, GROUP, generator, symmetric=False, ordered=True)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    parts = {"qweight": words(codes.t(), 4, order), "qzeros": words(zeros.t(), 4, order), "scales": scales.t()}
    return parts, weight


def packed(bits: int, *, symmetric: bool = True, ordered: bool = True):
    def layer(shape: torch.Size, generator: torch.Generator) -> Made:
        codes, zeros, scales, groups, weight = drawn(
            shape, bits, GROUP, generator, symmetric=symmetric, ordered=ordered
        )
        parts = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(shape)}
        if not symmetric:
            parts["weight_zero_point"] = words(zeros.t(), bits).t()
        return parts | ({} if ordered else {"weight_g_idx": groups.int()}), weight

    return layer


def eight_bits(shape: torch.Size, generator: torch.Generator) -> Made:
    numbers = torch.randint(-127, 128, shape, generator=generator)
    scales = (0.001 + 0.002 * torch.rand(shape[0], 1, generator=generator)).bfloat16()
    return {"weight": numbers.to(torch.int8), "weight_scale": scales}, numbers * scales.float()


def floats(name: str = "weight_scale", *, by: str):
    def layer(shape: torch.Size, generator: torch.Generator) -> Made:
        numbers = (100 * torch.randn(shape, generator=generator)).to(torch.float8_e4m3fn)
        sizes = {"tensor": (1, 1), "output": (shape[0], 1), "block": (-(-shape[0] // 32), -(-shape[1] // 32))}[by]
        scales = 0.001 + 0.002 * torch.rand(sizes, generator=generator)
        weight = torch.empty(shape)
        for i in range(shape[0]):
            for j in range(0, shape[1], 32):
                row, column = {"tensor": (0, 0), "output": (i, 0), "block": (i // 32, j // 32)}[by]
                weight[i, j : j + 32] = numbers[i, j : j + 32].float() * scales[row, column]
        return {"weight": numbers, name: scales if by != "tensor" else scales.reshape(())}, weight

    return layer


def nf4(*, nested: bool = False):
    def layer(shape: torch.Size, generator: torch.Generator) -> Made:
        count = shape[0] * shape[1]
        codes = torch.randint(0, 16, (count,), generator=generator)
        blocks = -(-count // 64)
        scales = 0.1 + 0.2 * torch.rand(blocks, generator=generator)
        facts = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
        parts = {"weight": (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None], "weight.quant_map": NF4.clone()}
        if nested:
            table = torch.linspace(-1, 1, 256)
            numbers = torch.randint(0, 256, (blocks,), generator=generator)
            outer = 0.01 + 0.02 * torch.rand(-(-blocks // 16), generator=generator)
            scales = torch.stack([table[number] * outer[at // 16] for at, number in enumerate(numbers)]) + 0.125
            facts |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 0.125}
            parts |= {"weight.nested_absmax": outer, "weight.nested_quant_map": table}
        parts["weight.absmax"] = numbers.to(torch.uint8) if nested else scales
        octets = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
        weight = NF4[codes] * scales.repeat_interleave(64)[:count]
        return parts | {"weight.quant_state.bitsandbytes__nf4": octets}, weight.view(shape)

    return layer


def int8_bitsandbytes(shape: torch.Size, generator: torch.Generator) -> Made:
    numbers = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
    scales = 0.1 + torch.rand(shape[0], generator=generator)
    parts = {"weight": numbers, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, numbers * (scales / 127)[:, None]


def mxfp4(weight: Tensor) -> Tensors:
    """Draw codes and scales for experts [experts, in, out], which gpt_oss keeps as [experts, out, in / 32, 16]."""
    experts, n_inputs, n_outputs = weight.shape
    generator = torch.Generator().manual_seed(n_outputs)
    blocks = torch.randint(0, 256, (experts, n_outputs, n_inputs // 32, 16), generator=generator)
    scales = torch.randint(120, 124, (experts, n_outputs, n_inputs // 32), generator=generator)
    return {"_blocks": blocks.to(torch.uint8), "_scales": scales.to(torch.uint8)}


def values_of_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The numbers of a tensor in MXFP4: two in an octet, the first one in the low bits. Returns [experts, in, out]."""
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    both = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], dim=-1).flatten(-2)
    return (both * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2)
