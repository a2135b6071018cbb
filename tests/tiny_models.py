"""Tiny models of every kind of memory, made once: llama.cpp's own random ones, and some of ours.

Every tensor is random, so what the models write is garbage, and the same garbage in every run.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from llamactl_builder import paths, pin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

TINY = "tiny:"
GENERATOR = "test-llama-archs"
SEED = 20
ARCHITECTURES = (
    *("llama", "llama4", "gemma3", "qwen3", "qwen3moe"),
    *("mamba2", "qwen35", "lfm2", "jamba", "kimi-linear", "minimax-01"),
    *("deepseek4", "dots3note", "glm5-next", "hy_v4", "minimax-m3"),
)
N_VOCAB, N_EMBD = 128, 256
N_LAYERS_DEEP = 24
LONG_ROPE_CELLS = 4096
LORA_RANK = 4
LORA_SIZE = 0.5
"""Against weights of 0.1: it changes what is written from the first tokens on."""
BLUR = 0.1
"""How far a draft model is from its target: near enough that some of its drafts are accepted."""
LAYER, NEXT_LAYER = "blk.1.", "blk.2."
"""The layer of the tiny qwen35 that has attention, and the one that predicts a token more."""

NEW_KINDS = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32}
"""How a value is written that the source does not have."""

Tensor = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TinyModels:
    """Where the files are."""

    directory: Path

    def model(self, name: str) -> Path:
        """Return a model by its name: an architecture with `-dense` or `-moe`, or one of ours."""
        path = self.directory / f"{name}.gguf"
        assert path.is_file(), f"{name} is not among {sorted(self.directory.iterdir())}"
        return path

    def options(self, words: Iterable[str]) -> tuple[str, ...]:
        """Return options of the engine with the paths of the models that they name as tiny:NAME."""
        return tuple(
            str(self.model(word.removeprefix(TINY))) if word.startswith(TINY) else word
            for word in words
        )


def ensure(tools: Callable[[], Path]) -> TinyModels:
    """Return the tiny models, made with the generator in `tools()` if they are not in the cache."""
    source = pin.load(paths.patches_dir()).source_sha256
    key = hashlib.sha256(source.encode() + Path(__file__).read_bytes()).hexdigest()[:16]
    home = paths.cache_dir() / "tiny-models" / key
    if not home.is_dir():
        home.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent, prefix=".make-") as scratch:
            made = Path(scratch) / home.name
            made.mkdir()
            make(made, tools() / GENERATOR)
            if not home.is_dir():  # another process may have been faster
                made.rename(home)
    return TinyModels(home)


def make(directory: Path, generator: Path) -> None:
    """Make all the files; the same bytes every time."""
    wanted = f"^({'|'.join(ARCHITECTURES)})$"
    done = subprocess.run(
        [generator, "-s", str(SEED), "-a", wanted, "-o", directory],
        capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    llama, qwen35 = directory / "llama-dense.gguf", directory / "qwen35-dense.gguf"
    write_blurred(llama, directory / "llama-draft.gguf")
    write_blurred(qwen35, directory / "qwen35-draft.gguf")
    write_next_token_layer(qwen35, directory / "qwen35-mtp.gguf")
    write_deep(qwen35, directory / "qwen35-deep.gguf")
    write_ranker(directory / "qwen3-dense.gguf", directory / "qwen3-ranker.gguf")
    write_long_rope(llama, directory / "llama-longrope.gguf")
    write_lora(llama, directory / "llama-lora.gguf")
    write_control_vector(directory / "llama-control-vector.gguf")


def write_blurred(model: Path, target: Path) -> None:
    """Write a model that is near another: each of its weights is off by some part of itself."""
    random = np.random.default_rng(SEED)
    reader = gguf.GGUFReader(model)

    def blurred(tensor: Tensor) -> Tensor:
        noise = random.standard_normal(tensor.shape, np.float32)
        return (tensor * (1 + BLUR * noise)).astype(tensor.dtype)

    tensors = {tensor.name: blurred(tensor.data) for tensor in reader.tensors}
    write(target, reader, tensors)


def write_next_token_layer(model: Path, target: Path) -> None:
    """Write a qwen35 with one more layer, which predicts the token after the next one (MTP).

    Its layer is the trunk's attention layer again, on the embedding of the newest token and a
    little of the trunk's last state: near enough to the trunk that some drafts are accepted.
    """
    random = np.random.default_rng(SEED)
    reader = gguf.GGUFReader(model)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    layer = {
        name.replace(LAYER, NEXT_LAYER): tensor
        for name, tensor in tensors.items()
        if name.startswith(LAYER)
    }
    of_token = np.eye(N_EMBD, dtype=np.float32)
    of_state = 0.05 * random.standard_normal((N_EMBD, N_EMBD), np.float32)
    layer[f"{NEXT_LAYER}nextn.eh_proj.weight"] = np.concatenate([of_token, of_state], axis=1)
    layer[f"{NEXT_LAYER}nextn.enorm.weight"] = np.full(N_EMBD, 0.1, np.float32)
    layer[f"{NEXT_LAYER}nextn.hnorm.weight"] = np.full(N_EMBD, 0.1, np.float32)
    layer[f"{NEXT_LAYER}nextn.shared_head_norm.weight"] = tensors["output_norm.weight"]
    replaced = {
        "qwen35.block_count": 3,
        "qwen35.nextn_predict_layers": 1,
        "qwen35.attention.recurrent_layers": [1, 0, 0],
    }
    write(target, reader, tensors | layer, replaced)


def write_deep(model: Path, target: Path) -> None:
    """Write a qwen35 with its two layers many times over: a hybrid with megabytes of state."""
    reader = gguf.GGUFReader(model)
    tensors = {}
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk."):
            tensors[tensor.name] = tensor.data
            continue
        _, n, rest = tensor.name.split(".", 2)
        for layer in range(int(n), N_LAYERS_DEEP, 2):
            tensors[f"blk.{layer}.{rest}"] = tensor.data
    of_each_layer = ("attention.recurrent_layers", "swiglu_clamp_exp", "swiglu_clamp_shexp")
    replaced: dict[str, object] = {
        f"qwen35.{name}": reader.fields[f"qwen35.{name}"].contents() * (N_LAYERS_DEEP // 2)
        for name in of_each_layer
    }
    write(target, reader, tensors, replaced | {"qwen35.block_count": N_LAYERS_DEEP})


def write_ranker(model: Path, target: Path) -> None:
    """Write a qwen3 with the two outputs of a reranker, yes and no."""
    random = np.random.default_rng(SEED)
    reader = gguf.GGUFReader(model)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    head = {"cls.output.weight": random.standard_normal((2, N_EMBD), np.float32)}
    write(target, reader, tensors | head, {"qwen3.classifier.output_labels": ["yes", "no"]})


def write_long_rope(model: Path, target: Path) -> None:
    """Write a llama that turns with other factors above LONG_ROPE_CELLS cells for each sequence."""
    reader = gguf.GGUFReader(model)
    n_factors = int(reader.fields["llama.rope.dimension_count"].contents()) // 2
    factors = {
        "rope_factors_short.weight": np.ones(n_factors, np.float32),
        "rope_factors_long.weight": np.full(n_factors, 4, np.float32),
    }
    added = {
        "llama.rope.scaling.type": "longrope",
        "llama.rope.scaling.original_context_length": LONG_ROPE_CELLS,
    }
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    tensors.pop("rope_freqs.weight")
    write(target, reader, tensors | factors, added)


def write_lora(model: Path, target: Path) -> None:
    """Write a LoRA adapter of the attention's input and output."""
    random = np.random.default_rng(SEED)
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", LORA_RANK)
    for tensor in gguf.GGUFReader(model).tensors:
        if tensor.name.endswith(("attn_q.weight", "attn_v.weight", "attn_output.weight")):
            n_out, n_in = tensor.data.shape
            for half, shape in {"a": (LORA_RANK, n_in), "b": (n_out, LORA_RANK)}.items():
                values = LORA_SIZE * random.standard_normal(shape, np.float32)
                writer.add_tensor(f"{tensor.name}.lora_{half}", values)
    finish(writer)


def write_control_vector(target: Path) -> None:
    """Write a control vector for the tiny llama's second layer."""
    random = np.random.default_rng(SEED)
    writer = gguf.GGUFWriter(target, "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_tensor("direction.1", random.standard_normal(N_EMBD, np.float32))
    finish(writer)


def write(
    target: Path,
    source: gguf.GGUFReader,
    tensors: Mapping[str, Tensor],
    replaced: Mapping[str, object] | None = None,
) -> None:
    """Write a model with another's metadata, some of its values replaced, and these tensors."""
    values = {name: field.contents() for name, field in source.fields.items()}
    writer = gguf.GGUFWriter(target, values["general.architecture"])
    for name, value in (values | dict(replaced or {})).items():
        if name.startswith("GGUF.") or name == "general.architecture" or value == []:
            continue  # the writer's own, and what it cannot write: an empty array
        known = source.fields.get(name)
        kind, *of = known.types if known else [NEW_KINDS[type(value)]]
        writer.add_key_value(name, value, kind, of[0] if of else None)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write everything to the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
