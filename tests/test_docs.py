"""The documents: their links lead somewhere, what they say to run runs, and it answers so."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from cli_home import Home, fresh_home
from documents import NEEDS, ROOT, Block, anchors, blocks, documents, links, tokens
from llamactl_supervisor.engine_metrics import ENGINE_METRICS
from llamactl_supervisor.errors import Code, error, http_status

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

OVERLAY = ROOT / "patches" / "overlay" / "tools" / "server"
SHELL = {"sh", "console"}
"""What is run; of a console what follows a prompt."""
LANGUAGES = {*SHELL, "ini", "json", "python", "text", "toml"}
ENGINE, BESIDE = "a running engine", "a second terminal"
LACKING = {
    ENGINE: "run below, on the real engine",
    BESIDE: "the same, beside the blocks that follow it",
    "minutes": "it compiles llama.cpp, or measures",
    "a model of yours": "the names in it are examples",
    "an orchestrator": "it is one that starts it",
    "systemd": "it changes a service manager's units",
    "a container engine": "it builds or runs an image",
    "Kubernetes": "it changes a cluster",
    "a checkout of your own": "it changes the tree",
}
"""What a marker may name, and why the block is not run like the others."""
LEFT_OUT = "..."
"""As a key of an object in a document: it has more than what is shown."""
RUN_S = 300


@pytest.fixture
def home() -> Iterator[Home]:
    """A home with the commands of the documents in its `bin`."""
    with fresh_home() as home:
        bin_dir = home.root / "bin"
        bin_dir.mkdir()
        for name, words in (("llamactl", "-m llamactl_cli "), ("python", "")):
            program = bin_dir / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words}"$@"\n')
            program.chmod(0o755)
        yield home


@pytest.mark.parametrize("document", documents())
def test_every_link_leads_somewhere(document: str) -> None:
    assert [link for link in links(document) if not leads(document, link)] == []


def leads(document: str, link: str) -> bool:
    """Whether the file is there, and the heading in it."""
    name, _, anchor = link.partition("#")
    target = ((ROOT / document).parent / name).resolve() if name else ROOT / document
    if not target.exists() or not anchor:
        return target.exists()
    return target.suffix == ".md" and anchor in anchors(str(target.relative_to(ROOT)))


@pytest.mark.parametrize("document", documents())
def test_what_is_to_be_made_is_in_the_makefile(document: str) -> None:
    asked = set(re.findall(r"`make ([a-z][a-z-]*)", (ROOT / document).read_text()))
    assert asked <= set(re.findall(r"[a-z-]+", (ROOT / "Makefile").read_text()))


@pytest.mark.parametrize("document", documents())
def test_our_modules_are_run_by_the_python_that_has_them(document: str) -> None:
    """That of the tree, by its path from the root: on PATH it need not be."""
    said = (ROOT / document).read_text()
    assert re.findall(r"(?<!\.venv/bin/)python3? -m (?:llamactl_|pytest|mypy|ruff)\w*", said) == []


@pytest.mark.parametrize("document", documents())
def test_every_block_says_what_it_is_and_what_it_needs(document: str) -> None:
    found, made = list(blocks(document)), tokens(document)
    indented = [token.map for token in made if token.type == "code_block"]
    assert indented == [], "a block is fenced: one that is indented has no language"
    assert [str(b) for b in found if b.language not in LANGUAGES] == [], "no language of ours"
    assert [str(b) for b in found if b.needs not in {None, *LACKING}] == [], "needs what?"
    comments = [NEEDS.fullmatch(each.content) for each in made if each.type == "html_block"]
    markers = [comment[1] for comment in comments if comment]
    assert markers == [block.needs for block in found if block.needs], "a marker is above a block"


def of(*languages: str, needs: str | None) -> dict[str, list[Block]]:
    """Return the blocks in one of the languages that need this, by document."""
    found = {
        document: [b for b in blocks(document) if b.language in languages and b.needs == needs]
        for document in documents()
    }
    return {document: those for document, those in found.items() if those}


@pytest.mark.parametrize("found", of(*SHELL, needs=None).items(), ids=lambda found: found[0])
def test_what_needs_nothing_runs(found: tuple[str, list[Block]], home: Home) -> None:
    run(found[1], home, {})


def test_a_configuration_is_one(home: Home) -> None:
    for block in itertools.chain(*of("toml", needs=None).values()):
        file = home.root / "config.toml"
        file.write_text(block.text)
        assert home.run("config", "check", "--syntax", str(file)).code == 0, block


@pytest.mark.parametrize("document", of(*SHELL, "python", needs=ENGINE))
def test_what_needs_an_engine_runs(
    document: str, home: Home, engine_path: Path, model_path: Path
) -> None:
    """In the order of the document and in one shell, on an engine as `make run` brings it up."""
    up = home.run(
        *("up", "--engine", str(engine_path), "--model", str(model_path)),
        *("--port", str(home.port)),
    )
    assert up.code == 0, up.err
    engine = {"LLAMACTL_ENGINE_PATH": str(engine_path)}
    variables = {"LLAMA_SERVER": str(engine_path), "MODEL": str(model_path), **engine}
    run([block for block in blocks(document) if block.needs in {ENGINE, BESIDE}], home, variables)


def run(found: Sequence[Block], home: Home, variables: Mapping[str, str]) -> None:
    """Run the blocks in one shell; each must succeed, and print what its document shows.

    `variables` are those that the documents speak of.
    """
    out, work = home.root / "out", home.root / "work"
    out.mkdir()
    work.mkdir()
    script = "trap 'jobs -p | xargs -r kill' EXIT\n" + "".join(
        f"exec >{out / str(number)} 2>{out / str(number)}.err\n{command(block, home.port)}\n"
        for number, block in enumerate(found)
    )
    env = os.environ | {"PATH": f"{home.root / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    env |= {"HOME": str(home.root), "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=work, env=env, stdin=subprocess.DEVNULL, check=False, timeout=RUN_S,
    )  # fmt: skip
    last = len(list(out.glob("*.err"))) - 1
    said = (out / f"{last}.err").read_text() + (out / str(last)).read_text()
    assert ended.returncode == 0, f"{found[last]}: exit {ended.returncode}: {said}"
    for number, block in enumerate(found):
        if block.answer is not None:
            printed = (out / str(number)).read_text()
            unlike = difference(json.loads(block.answer), json.loads(printed), "")
            assert unlike is None, f"{block}: {unlike}, in {printed}"


def command(block: Block, port: int) -> str:
    """Return the block as a shell has it; the port of the documents may be taken here."""
    text = block.text.replace("127.0.0.1:8080", f"127.0.0.1:{port}")
    text = text.replace("--port 8080", f"--port {port}")
    if block.needs == BESIDE:
        return f"(\n{text}) &\n"
    if block.language == "console":
        return "\n".join(re.findall(r"^\$ (.*)$", text, re.MULTILINE))
    return f"python - <<'END'\n{text}END" if block.language == "python" else text


def difference(shown: Any, said: Any, where: str) -> str | None:
    """Return where two JSON values differ in shape: in their keys, and in the kinds of values.

    Null is like anything, and so is what only one of two lists has.
    """
    if isinstance(shown, dict) and isinstance(said, dict):
        lacking = shown.keys() - {LEFT_OUT} - said.keys()
        more = said.keys() - shown.keys() if LEFT_OUT not in shown else set()
        if lacking or more:
            return f"{where or 'it'} has no {sorted(lacking)} and has {sorted(more)}"
        pairs = [(shown[key], said[key], f"{where}.{key}") for key in shown.keys() & said.keys()]
    elif isinstance(shown, list) and isinstance(said, list):
        both = zip(shown, said, strict=False)
        pairs = [(one, other, f"{where}[{at}]") for at, (one, other) in enumerate(both)]
    elif shown is None or said is None or kind(shown) == kind(said):
        pairs = []
    else:
        return f"{where} is {said!r}, not like {shown!r}"
    return next(filter(None, (difference(*pair) for pair in pairs)), None)


def kind(value: Any) -> type:
    return float if type(value) is int else type(value)


@pytest.mark.parametrize(
    ("shown", "said", "unlike"),
    [
        ({"a": 1}, {"a": 2.5}, None),
        ({"a": 1}, {"a": "1"}, ".a is '1', not like 1"),
        ({"a": 1}, {"a": True}, ".a is True, not like 1"),
        ({"a": [{"b": 1}]}, {"a": [{"c": 1}]}, ".a[0] has no ['b'] and has ['c']"),
        ({"a": 1, LEFT_OUT: ""}, {"a": 1, "b": 1}, None),
        ({"a": None}, {"a": {"b": 1}}, None),
    ],
)
def test_an_answer_of_another_shape_is_noticed(shown: Any, said: Any, unlike: str | None) -> None:
    assert difference(shown, said, "") == unlike


def rows(document: str) -> list[list[str]]:
    """Return the cells of every row of every table."""
    lines = (ROOT / document).read_text().splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]


def named(document: str, second: str) -> list[tuple[str, str]]:
    """Return the first two cells of the rows that begin with a name and then have this."""
    return [
        (row[0].strip("`"), row[1])
        for row in rows(document)
        if re.fullmatch("`[a-z_]+`", row[0]) and re.fullmatch(second, row[1])
    ]


def test_every_error_has_what_to_do() -> None:
    """Each code has one row, with the exit code and the HTTP status that it has."""
    known = [(str(code), error(code, "")) for code in Code]
    assert sorted(named("docs/operations.md", r"\d+, \d+")) == sorted(
        (code, f"{exc.exit_code.value}, {http_status(exc)}") for code, exc in known
    )


def test_every_reason_of_the_engine_has_its_status() -> None:
    known = [*reasons("server-reconfigure.cpp"), *reasons("server-pages.cpp")]
    assert len(known) > 20
    assert sorted(named("docs/engine-http.md", r"\d+")) == sorted(known)


def reasons(file: str) -> Iterator[tuple[str, str]]:
    """Yield the reasons that the engine gives, with their status, from its own two switches."""
    text = (OVERLAY / file).read_text()
    names = dict(re.findall(r'case (\w+_REASON_\w+): +return "(\w+)";', text))
    found = re.search(r"_reason_status\(.*?\n}\n", text, re.DOTALL)
    assert found
    statuses: dict[str, str] = {}
    waiting: list[str] = []
    for case, default, status in re.findall(r"case (\w+)|(default)|return (\d+);", found[0]):
        waiting += [case or default] if case or default else []
        if status:
            statuses |= dict.fromkeys(waiting, status)
            waiting = []
    for case, name in names.items():
        if name != "none":
            yield name, statuses.get(case, statuses["default"])


def test_every_metric_of_the_engine_that_is_named_is_there() -> None:
    text = (ROOT / "docs" / "engine-http.md").read_text()
    section = text.partition("## GET /metrics")[2].partition("\n## ")[0]
    told = set(re.findall(r"`([a-z_]{4,})`", section))
    assert len(told) > 15
    assert told <= {metric.name for metric in ENGINE_METRICS}


def test_every_hook_is_told_with_its_subject() -> None:
    told = [(row[0], row[1]) for row in rows("patches/README.md") if row[0].startswith("[`")]
    subjects = []
    for name in (ROOT / "patches" / "series").read_text().split():
        header = (ROOT / "patches" / "hooks" / name).read_text()
        hook, _, subject = header.partition("\n")[0].partition(": ")
        subjects.append((f"[`{hook}`](hooks/{name})", subject))
    assert told == subjects
