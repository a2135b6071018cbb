"""Where the source comes from: submodule first, then the package with its hash, else both named."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from llamactl_builder import source, treehash
from llamactl_builder.errors import SourceError
from upstream_fixture import COMMON, FILES, INPUTS, Upstream, copy_upstream, write_files

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def up(tiny_upstream: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Upstream:
    """The tiny upstream; pip sees its package directory and no index."""
    upstream = copy_upstream(tiny_upstream, tmp_path)
    monkeypatch.setenv("LLAMACTL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(upstream.packages))
    return upstream


def inputs_of(root: Path) -> dict[str, bytes]:
    return {path: (root / path).read_bytes() for path in treehash.list_files(root, INPUTS)}


def test_the_package_gives_the_same_tree(up: Upstream) -> None:
    found = source.fetch(up.pin, up.patches)
    assert inputs_of(found) == inputs_of(up.source)
    assert not (found / ".git").exists()


def test_the_unpacked_package_is_used_again_and_a_damaged_one_replaced(up: Upstream) -> None:
    found = source.fetch(up.pin, up.patches)
    package = up.packages / "tiny_carrier-1.0.tar.gz"
    package.rename(up.packages / "hidden")
    assert source.fetch(up.pin, up.patches) == found
    (up.packages / "hidden").rename(package)
    write_files(found, {COMMON: b"damaged\n"})
    assert source.fetch(up.pin, up.patches) == found
    assert inputs_of(found) == inputs_of(up.source)


def test_the_submodule_at_the_pin_comes_first(up: Upstream) -> None:
    shutil.rmtree(up.packages)
    shutil.copytree(up.source, up.patches / "llama.cpp")
    write_files(up.patches, {"llama.cpp/.git": b"gitdir: elsewhere\n"})
    (up.patches / "llama.cpp" / COMMON).chmod(0o755)
    assert source.fetch(up.pin, up.patches) == up.patches / "llama.cpp"


def test_a_submodule_off_the_pin_is_passed_over(up: Upstream) -> None:
    shutil.copytree(up.source, up.patches / "llama.cpp")
    write_files(up.patches, {f"llama.cpp/{COMMON}": b"another commit\n"})
    assert source.fetch(up.pin, up.patches).parent.name == "source"


def test_no_source_names_both_ways(up: Upstream) -> None:
    shutil.rmtree(up.packages)
    with pytest.raises(SourceError) as caught:
        source.fetch(up.pin, up.patches)
    assert caught.value.code == "source_unavailable"
    assert f"The submodule {up.patches / 'llama.cpp'} is not checked out" in caught.value.message
    assert "The package tiny-carrier==1.0: pip download ended with" in caught.value.message
    assert caught.value.hint is not None
    assert "git submodule update --init patches/llama.cpp" in caught.value.hint
    assert "pip download tiny-carrier==1.0" in caught.value.hint


def test_a_package_with_another_hash_is_refused(up: Upstream) -> None:
    package = up.packages / "tiny_carrier-1.0.tar.gz"
    package.write_bytes(package.read_bytes() + b"\0")
    with pytest.raises(SourceError, match="HASHES") as caught:
        source.fetch(up.pin, up.patches)
    assert caught.value.code == "source_unavailable"
    assert not (up.patches.parent / "cache" / "source").exists() or not any(
        (up.patches.parent / "cache" / "source").iterdir()
    )


def test_a_pin_whose_hashes_disagree_is_refused(up: Upstream) -> None:
    pin_path = up.patches / "upstream.toml"
    good = up.pin.source_sha256
    pin_path.write_text(pin_path.read_text().replace(good, "0" * 64))
    with pytest.raises(SourceError, match=good) as caught:
        source.fetch(up.pin, up.patches)
    assert caught.value.code == "source_mismatch"


def test_the_tree_hash_is_what_sha256sum_says(tmp_path: Path) -> None:
    """Independent of this code: sha256 of `sha256sum` lines, sorted by path."""
    write_files(tmp_path, {"a/x": b"x\n", "a/.git": b"skip", "b": b"b\n", "c": b"not an input"})
    assert treehash.list_files(tmp_path, ["b", "a"]) == ["a/x", "b"]
    assert treehash.tree_sha256(tmp_path, ["b", "a"]) == (
        "cb9494461e043d9e9ba56c5deb0b7fdc6e0003e98f1b4726959de88a56295975"
    )
    assert treehash.tree_sha256(tmp_path, ["a", "b"], {"a/x": b"y\n"}) != treehash.tree_sha256(
        tmp_path, ["a", "b"]
    )


def test_hashed_inputs_exclude_what_no_build_reads(up: Upstream) -> None:
    before = treehash.tree_sha256(up.source, INPUTS)
    write_files(up.source, {"docs/unread.md": b"changed\n"})
    assert treehash.tree_sha256(up.source, INPUTS) == before
    assert "docs/unread.md" in FILES
