"""Steps of a random llama by llama.cpp, for `benchmarks/ggml.py`, in an environment that has `llama-cpp-python`.

    python ggml_steps.py FOLDER HIDDEN INTERMEDIATE BLOCKS KIND

KIND is a type of ggml's, as Q8_0. The process prints "ready", and then answers each line of its input, "1 session" or
"prompt of 512", by how many milliseconds that took. Sessions have 64 positions behind them, before and after.
"""

import sys
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy

BEFORE, SESSIONS, PROMPT, VOCABULARY = 64, 9, 512, 64


def main() -> None:
    folder, *sizes, kind = sys.argv[1:]
    path = Path(folder, f"{kind}.gguf")
    write(path, *map(int, sizes), gguf.GGMLQuantizationType[kind])
    steps = Steps(path)
    print("ready", flush=True)
    for line in sys.stdin:
        what = line.strip()
        began = time.perf_counter()
        steps.prompt() if what.startswith("prompt") else steps.step(int(what.split()[0]))
        print(1000 * (time.perf_counter() - began), flush=True)
        steps.keep()


def write(path: Path, hidden: int, intermediate: int, blocks: int, kind: gguf.GGMLQuantizationType) -> None:
    """Write a random llama with heads of 64 numbers, all of whose matrices have a type."""
    drawn = numpy.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    for add, value in (
        (writer.add_context_length, 4096),
        (writer.add_embedding_length, hidden),
        (writer.add_block_count, blocks),
        (writer.add_feed_forward_length, intermediate),
        (writer.add_head_count, hidden // 64),
        (writer.add_head_count_kv, hidden // 64),
        (writer.add_rope_dimension_count, 64),
        (writer.add_layer_norm_rms_eps, 1e-6),
        (writer.add_vocab_size, VOCABULARY),
    ):
        add(value)
    writer.add_tokenizer_model("no_vocab")

    def matrix(name: str, outputs: int, inputs: int) -> None:
        numbers = 0.02 * drawn.standard_normal((outputs, inputs), dtype=numpy.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(numbers, kind), raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", numpy.ones(hidden, numpy.float32))

    matrix("token_embd", VOCABULARY, hidden)
    matrix("output", VOCABULARY, hidden)
    norm("output_norm")
    for index in range(blocks):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{index}.{name}", hidden, hidden)
        matrix(f"blk.{index}.ffn_gate", intermediate, hidden)
        matrix(f"blk.{index}.ffn_up", intermediate, hidden)
        matrix(f"blk.{index}.ffn_down", hidden, intermediate)
        norm(f"blk.{index}.attn_norm")
        norm(f"blk.{index}.ffn_norm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Steps:
    """A loaded model, on one thread."""

    def __init__(self, path: Path) -> None:
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_default_params()
        model.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model)
        assert self._model, "llama.cpp did not load the file"
        context: Any = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = 1024 * (SESSIONS + 1), PROMPT, PROMPT
        context.n_seq_max, context.n_threads, context.n_threads_batch = SESSIONS + 1, 1, 1
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        assert self._context, "llama.cpp made no context"
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(PROMPT, 0, 1)
        for session in range(SESSIONS):
            self._decode([(session, position) for position in range(BEFORE)])

    def step(self, sessions: int) -> None:
        """Compute one position of so many sessions."""
        self._decode([(session, BEFORE) for session in range(sessions)])

    def prompt(self) -> None:
        """Compute a prompt of a session that has nothing else."""
        self._decode([(SESSIONS, position) for position in range(PROMPT)])

    def keep(self) -> None:
        """Take back what is behind each session's first positions."""
        for session in range(SESSIONS):
            llama_cpp.llama_memory_seq_rm(self._memory, session, BEFORE, -1)
        llama_cpp.llama_memory_seq_rm(self._memory, SESSIONS, 0, -1)

    def _decode(self, positions: list[tuple[int, int]]) -> None:
        batch = self._batch
        batch.n_tokens = len(positions)
        for place, (session, position) in enumerate(positions):
            batch.token[place], batch.pos[place] = (7 * place + position) % VOCABULARY, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, session
            batch.logits[place] = place == len(positions) - 1 or position == BEFORE
        assert llama_cpp.llama_decode(self._context, batch) == 0
        llama_cpp.llama_get_logits(self._context)  # waits


if __name__ == "__main__":
    main()
