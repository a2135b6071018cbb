"""The patch-set tool on a tiny synthetic upstream: round trip, folding, and what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from llamactl_builder import patchset
from llamactl_builder.errors import PatchError
from upstream_fixture import COMMON, FILES, NEW, SERVER, Upstream, copy_upstream, git, write_files

if TYPE_CHECKING:
    from pathlib import Path

FIRST, SECOND = "hooks/first-call.patch", "hooks/second-call.patch"


@pytest.fixture
def up(tiny_upstream: Path, tmp_path: Path) -> Upstream:
    return copy_upstream(tiny_upstream, tmp_path)


def refusal(up: Upstream, code: str) -> str:
    """Verify must refuse with this code; answers the message."""
    with pytest.raises(PatchError) as caught:
        up.verify()
    assert caught.value.code == code
    return caught.value.message


def replace(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))


def test_export_writes_canonical_hooks(up: Upstream) -> None:
    assert (up.patches / "series").read_bytes() == b"first-call.patch\nsecond-call.patch\n"
    assert (up.patches / FIRST).read_text() == (
        "first-call: call first() after line 5\n"
        "\n"
        "Because. Called from main.\n"
        "\n"
        f"diff --git a/{SERVER} b/{SERVER}\n"
        f"--- a/{SERVER}\n"
        f"+++ b/{SERVER}\n"
        "@@ -3,7 +3,7 @@\n"
        "     line(2);\n"
        "     line(3);\n"
        "     line(4);\n"
        "-    line(5);\n"
        "+    line(5); first();\n"
        "     line(6);\n"
        "     line(7);\n"
        "     line(8);\n"
    )
    assert (up.patches / "overlay" / NEW).read_bytes() == b"void first() {}\n"


def test_apply_then_export_is_byte_identical(up: Upstream, tmp_path: Path) -> None:
    before = up.patch_bytes()
    again = up.apply(tmp_path / "again")
    assert (again / SERVER).read_bytes() == (up.tree / SERVER).read_bytes()
    assert up.export(tree=again) == []
    assert up.patch_bytes() == before
    up.verify()


def test_the_developers_git_configuration_does_not_leak(
    up: Upstream, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = up.patch_bytes()
    settings = "[core]\nautocrlf = true\nbigFileThreshold = 1\n[diff]\nnoprefix = true\n"
    (tmp_path / ".gitconfig").write_text(settings)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_DIFF_OPTS", "-u9")
    git(up.tree, "config", "diff.noprefix", "true")
    git(up.tree, "config", "color.ui", "always")
    assert up.export() == []
    again = up.apply(tmp_path / "again")
    assert up.export(tree=again) == []
    assert up.patch_bytes() == before


def test_lines_without_newline_and_with_carriage_return_survive(up: Upstream) -> None:
    up.edit("tools/server/crlf.txt", "two\r\n", "two\r\nhalf\r\n")
    up.edit("tools/server/no-newline.txt", "two", "two\nthree")
    up.commit("line-ends: odd line ends")
    up.export()
    up.verify()
    made = patchset.patched_files(up.source, patchset.load(up.patches))
    assert made["tools/server/crlf.txt"] == b"one\r\ntwo\r\nhalf\r\nthree\r\n"
    assert made["tools/server/no-newline.txt"] == b"one\ntwo\nthree"


def test_an_edit_folds_into_the_only_hook_of_its_file(up: Upstream, tmp_path: Path) -> None:
    first = (up.patches / FIRST).read_bytes()
    up.edit(COMMON, "common_9;", "common_9 = 9;")
    assert up.export() == [f"wrote {SECOND}", "wrote upstream.toml"]
    assert (up.patches / FIRST).read_bytes() == first
    assert b"+int common_9 = 9;\n" in (up.patches / SECOND).read_bytes()
    up.verify()
    assert git(up.tree, "status", "--porcelain") == ""
    assert (up.apply(tmp_path / "again") / COMMON).read_bytes() == (up.tree / COMMON).read_bytes()


def test_an_edit_of_a_shared_file_needs_a_hook_named(up: Upstream) -> None:
    up.edit(SERVER, "line(30);", "line(30); third();")
    before = up.patch_bytes()
    with pytest.raises(PatchError, match="first-call, second-call") as caught:
        up.export()
    assert caught.value.code == "hook_ambiguous"
    assert up.patch_bytes() == before
    up.export("first-call")
    assert b"line(30); third();" in (up.patches / FIRST).read_bytes()
    assert b"line(30); third();" not in (up.patches / SECOND).read_bytes()
    up.verify()
    assert up.export() == []


def test_an_edit_on_top_of_a_later_hook_cannot_go_into_an_earlier_one(up: Upstream) -> None:
    up.edit(SERVER, "line(20); second();", "line(20); second(2);")
    before = up.patch_bytes()
    with pytest.raises(PatchError) as caught:
        up.export("first-call")
    assert caught.value.code == "hook_overlap"
    assert up.patch_bytes() == before
    up.export("second-call")
    up.verify()


def test_an_edit_of_an_untouched_file_and_an_unknown_hook_are_refused(up: Upstream) -> None:
    up.edit("tools/server/crlf.txt", "two", "zwei")
    with pytest.raises(PatchError, match="No hook touches"):
        up.export()
    with pytest.raises(PatchError) as caught:
        up.export("third-call")
    assert caught.value.code == "hook_unknown"


def test_overlay_follows_the_tree(up: Upstream) -> None:
    write_files(up.tree, {NEW: b"void first() { }\n", "tools/server/server-more.h": b"\n"})
    write_files(up.tree, {"build/junk.cpp": b"ignored by upstream's .gitignore\n"})
    changes = up.export()
    assert f"wrote overlay/{NEW}" in changes
    assert "wrote overlay/tools/server/server-more.h" in changes
    up.verify()
    (up.tree / NEW).unlink()
    assert f"removed overlay/{NEW}" in up.export()
    assert set(patchset.load(up.patches).overlay) == {"tools/server/server-more.h"}


def test_an_edit_of_the_patch_set_itself_is_not_overwritten(up: Upstream, tmp_path: Path) -> None:
    """In a file that the tree has older, in a hook, and as a file that the tree does not know."""
    write_files(up.tree, {NEW: b"void first(int) {}\n"})
    up.export()
    (up.patches / "overlay" / NEW).write_bytes(b"void first(long) {}\n")
    write_files(up.patches, {"overlay/tools/server/server-more.h": b"\n"})
    replace(up.patches / FIRST, b"+    line(5); first();", b"+    line(5); first(1);")
    up.edit(COMMON, "common_9;", "common_9 = 9;")
    before = up.patch_bytes()
    with pytest.raises(PatchError) as caught:
        up.export()
    assert caught.value.code == "patches_edited"
    named = f"{FIRST}, overlay/tools/server/server-more.h, overlay/{NEW} changed"
    assert named in caught.value.message
    assert up.patch_bytes() == before
    git(up.tree, "checkout", "-q", COMMON)
    fresh = up.apply(tmp_path / "fresh")
    assert up.export(tree=fresh) == ["wrote upstream.toml"], "the same edits, and their hash"
    up.verify()


def test_an_edit_that_the_tree_has_too_or_that_is_given_up_is_no_obstacle(up: Upstream) -> None:
    write_files(up.tree, {NEW: b"void first(int) {}\n"})
    (up.patches / "overlay" / NEW).write_bytes(b"void first(int) {}\n")
    assert up.export() == ["wrote upstream.toml"]
    write_files(up.tree, {NEW: b"void first(long) {}\n"})
    assert f"wrote overlay/{NEW}" in up.export(), "written since as it was exported"
    (up.patches / "overlay" / NEW).write_bytes(b"void first(char) {}\n")
    (up.patches / "overlay" / NEW).unlink()
    assert up.export() == [f"wrote overlay/{NEW}"]
    up.verify()


def test_a_tree_that_does_not_say_what_it_was_made_from_overwrites_nothing(up: Upstream) -> None:
    (up.tree / ".git" / "patch-set.sha256").unlink()
    write_files(up.tree, {NEW: b"void first(int) {}\n"})
    with pytest.raises(PatchError, match=f"overlay/{NEW} changed since") as caught:
        up.export()
    assert caught.value.code == "patches_edited"


def test_a_new_file_that_no_build_reads_is_refused(up: Upstream) -> None:
    write_files(up.tree, {"docs/ours.md": b"\n"})
    with pytest.raises(PatchError, match=r"docs/ours\.md") as caught:
        up.export()
    assert caught.value.code == "outside_inputs"


def test_a_deleted_upstream_file_is_refused(up: Upstream) -> None:
    (up.tree / COMMON).unlink()
    with pytest.raises(PatchError, match=COMMON) as caught:
        up.export()
    assert caught.value.code == "hook_not_a_change"


@pytest.mark.parametrize(
    ("subject", "body"), [("no name here", "Because."), ("Upper: case", "Because."), ("a: b", "")]
)
def test_a_hook_without_name_or_reason_is_refused(up: Upstream, subject: str, body: str) -> None:
    up.edit(COMMON, "common_30;", "common_30 = 30;")
    up.commit(subject, body)
    with pytest.raises(PatchError) as caught:
        up.export()
    assert caught.value.code == "hook_header"


def test_two_commits_of_one_hook_are_refused(up: Upstream) -> None:
    up.edit(COMMON, "common_30;", "common_30 = 30;")
    up.commit("second-call: again")
    with pytest.raises(PatchError) as caught:
        up.export()
    assert caught.value.code == "hook_duplicate"


def test_a_tree_of_another_source_is_refused(up: Upstream) -> None:
    write_files(up.source, {COMMON: FILES[COMMON] + b"int more;\n"})
    other = up.apply(up.tree.with_name("other"))
    with pytest.raises(PatchError) as caught:
        up.export(tree=other)
    assert caught.value.code == "pristine_mismatch"


def test_context_drift_is_refused(up: Upstream) -> None:
    changed = FILES[SERVER].replace(b"line(4);", b"line(44);")
    write_files(up.source, {SERVER: changed})
    message = refusal(up, "patch_rejected")
    assert f"first-call.patch does not apply: {SERVER} line 5" in message
    assert r"b'    line(4);\n'" in message
    assert r"b'    line(44);\n'" in message


def test_an_offset_is_refused(up: Upstream) -> None:
    write_files(up.source, {SERVER: b"\n" + FILES[SERVER]})
    assert f"{SERVER} line 3" in refusal(up, "patch_rejected")


def test_whitespace_drift_is_refused(up: Upstream) -> None:
    write_files(up.source, {SERVER: FILES[SERVER].replace(b"    line(6);", b"\tline(6);")})
    assert f"{SERVER} line 7" in refusal(up, "patch_rejected")


def test_a_tampered_overlay_is_found(up: Upstream) -> None:
    replace(up.patches / "overlay" / NEW, b"first", b"First")
    assert "overlay file is not as it was exported" in refusal(up, "patched_mismatch")


def test_a_tampered_hook_is_found(up: Upstream) -> None:
    replace(up.patches / FIRST, b"first();", b"First();")
    refusal(up, "patched_mismatch")


def test_a_hook_in_another_form_is_found(up: Upstream) -> None:
    """Less context gives the same tree, but not the same bytes."""
    replace(up.patches / FIRST, b"@@ -3,7 +3,7 @@\n     line(2);\n", b"@@ -4,6 +4,6 @@\n")
    assert FIRST in refusal(up, "export_differs")


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        (b"@@ -3,7 +3,7 @@", b"@@ -3,7 +4,7 @@", "patch_malformed"),
        (b"@@ -3,7 +3,7 @@", b"@@ -3,8 +3,8 @@", "patch_malformed"),
        (b"+++ b/tools", b"+++ b/Tools", "patch_malformed"),
        (b"first-call: ", b"other-call: ", "hook_header"),
    ],
)
def test_a_malformed_hook_is_refused(up: Upstream, old: bytes, new: bytes, code: str) -> None:
    replace(up.patches / FIRST, old, new)
    refusal(up, code)


def test_series_and_hooks_must_agree(up: Upstream) -> None:
    replace(up.patches / "series", b"first-call.patch\n", b"")
    assert "first-call.patch" in refusal(up, "series_mismatch")


def test_an_overlay_file_must_not_exist_upstream(up: Upstream) -> None:
    write_files(up.patches, {f"overlay/{COMMON}": b"\n"})
    assert COMMON in refusal(up, "overlay_shadows_upstream")


def test_apply_leaves_a_full_directory_alone(up: Upstream) -> None:
    with pytest.raises(PatchError) as caught:
        up.apply(up.tree)
    assert caught.value.code == "not_empty"
