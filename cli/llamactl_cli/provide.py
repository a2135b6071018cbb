"""The engine and the model: taken as given, or built and fetched where they are missing."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from llamactl_supervisor.errors import FailedError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llamactl_builder.build import EngineBuild
    from llamactl_builder.progress import Progress, ProgressCallback
    from llamactl_supervisor.config import Loaded

    from llamactl_cli.output import Output


def unnamed_engine(loaded: Loaded) -> str | None:
    """Return llamactl's engine if it is built, and no configuration or last engine names one."""
    from llamactl_builder.build import cached_engine
    from llamactl_builder.errors import BuilderError
    from llamactl_supervisor import groundwork, remains

    if groundwork.names_engine(loaded.config, remains.desired(loaded.paths)):
        return None
    os.environ.update(loaded.paths.env())  # all that the builder knows of a configuration
    with suppress(BuilderError):  # without a compiler it cannot tell which would be its own
        built = cached_engine()
        return None if built is None else str(built)
    return None


class Provider:
    """Builds and fetches with progress on stderr; `steps` names what had to be done."""

    def __init__(self, output: Output) -> None:
        from llamactl_supervisor.config import load_paths

        os.environ.update(load_paths().env())  # all that the builder knows of a configuration
        self._output = output
        self.steps: list[str] = []

    def build(self, *, unpatched: bool = False, cmake_args: Sequence[str] = ()) -> EngineBuild:
        """Return the engine for this machine, built if it is missing."""
        from llamactl_builder import build

        with self._reporting() as report:
            return build.ensure_engine(unpatched=unpatched, cmake_args=cmake_args, progress=report)

    def program(self, name: str) -> Path:
        """Return a program that stands beside engines: of one that is built, else built alone.

        No model is fetched.
        """
        from llamactl_builder import build

        with self._reporting() as report:
            engine = build.built_engine(name)
            if engine is not None:
                return engine.with_name(name)
            return build.ensure_programs(progress=report).directory / name

    def default_model(self) -> Path:
        """Return the default model, fetched if it is missing."""
        from llamactl_builder import models

        with self._reporting() as report:
            return models.ensure_default_model(progress=report)

    @contextmanager
    def _reporting(self) -> Iterator[ProgressCallback]:
        from llamactl_builder.errors import BuilderError
        from llamactl_builder.progress import TerminalProgress

        def note(report: Progress) -> None:
            if report.stage not in self.steps:
                self.steps.append(report.stage)

        def show(report: Progress) -> None:
            note(report)
            bars(report)

        try:
            if not self._output.talks:
                yield note
                return
            with TerminalProgress() as bars:
                yield show
        except BuilderError as exc:
            raise FailedError(exc.code, exc.message, hint=exc.hint) from exc


def provided(output: Output, engine: Path | None, model: Path | None) -> tuple[Path, Path]:
    """Return the engine and the model: those that are named, else configured, else ours."""
    from llamactl_supervisor.config import Flag, load

    asked = {"engine.engine_path": ("--engine", engine), "engine.model": ("--model", model)}
    flags = {
        key: Flag(name, str(path.absolute()))
        for key, (name, path) in asked.items()
        if path is not None
    }
    loaded = load(flags=flags)
    found, provider = loaded.config.engine, Provider(output)
    if found.model is not None:
        given_model(Path(found.model))
    if found.engine_path is not None:
        given_engine(Path(found.engine_path), loaded.values["engine.engine_path"].source)
    program = found.engine_path or provider.build().path
    return Path(program), Path(found.model or provider.default_model())


def given_model(path: Path) -> None:
    """Prove that the caller's model is a GGUF file."""
    from llamactl_builder import models
    from llamactl_builder.errors import ModelError

    try:
        models.check_gguf(path)
    except ModelError as exc:
        raise InvalidRequestError(exc.code, exc.message, hint=exc.hint) from exc


def given_engine(path: Path, source: str) -> None:
    """Prove that the llama-server that `source` gave is a program."""
    if not path.is_file() or not os.access(path, os.X_OK):
        raise typer.BadParameter(f"{path} is not a program that can be run", param_hint=source)
