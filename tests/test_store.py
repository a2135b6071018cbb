"""State that survives, and the lock that one daemon holds."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest
from llamactl_supervisor import store
from llamactl_supervisor.errors import LlamactlError
from llamactl_supervisor.models import EngineRequest, Intent, UpRequest

SAVED = store.Saved(
    intent=Intent.UP,
    generation=7,
    desired=UpRequest(spec=EngineRequest(model="/m.gguf"), engine_path="/e"),
    instance_id="abc",
)

if TYPE_CHECKING:
    from pathlib import Path


def test_nothing_saved_is_nothing_wanted(tmp_path: Path) -> None:
    assert store.load(tmp_path / "state.json") == (store.Saved(), None)


def test_what_is_saved_comes_back_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    store.save(path, SAVED)
    assert store.load(path) == (SAVED, None)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', '{"unknown": 1}', "\0" * 99])
def test_a_broken_file_is_set_aside_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    saved, aside = store.load(path)
    assert saved == store.Saved()
    assert aside is not None
    assert aside.read_text() == text
    store.save(path, SAVED)
    assert store.load(path) == (SAVED, None)


def test_a_file_that_cannot_be_read_stops_the_daemon(tmp_path: Path) -> None:
    (tmp_path / "state.json").mkdir()
    with pytest.raises(LlamactlError) as caught:
        store.load(tmp_path / "state.json")
    assert caught.value.code == "state_unreadable"


def test_a_failed_save_leaves_the_old_state(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    store.save(path, SAVED)
    (tmp_path / "state.json.new").mkdir()
    with pytest.raises(LlamactlError) as caught:
        store.save(path, store.Saved())
    assert caught.value.code == "state_unwritable"
    assert store.load(path) == (SAVED, None)
