"""The runs that are connected: each is asked for the engine once, and told what becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llamactl_supervisor import (
    args,
    caller_secrets,
    callers,
    command_line,
    instances,
    launch,
    logs,
    offload,
    preflight,
    pressure,
)
from llamactl_supervisor import events as ev
from llamactl_supervisor.errors import Code, LlamactlError, error
from llamactl_supervisor.models import OperationKind, Owner, Problem, RunMessage
from llamactl_supervisor.option_table import KV_UNIFIED, N_CTX, N_SEQ
from llamactl_supervisor.owner import waiting, who
from llamactl_supervisor.spec import named_files

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
    from datetime import datetime

    from llamactl_supervisor.command_line import Foreign
    from llamactl_supervisor.models import Operation, ProcessContext, RunRequest
    from llamactl_supervisor.option_table import ArgsAnswer
    from llamactl_supervisor.paths import Paths
    from llamactl_supervisor.snapshot import Snapshot

    Submit = Callable[[OperationKind, str, Callable[[str], ev.Command]], Awaitable[Operation]]

PRESSURE_POLL_S = 1.0
RETRY_S = 0.05
"""Pause between two tries to have an engine that another still has."""
NOTICE_S = 3.0
"""Who has heard nothing for so long is told what the engine is doing."""
WAITED_FOR = frozenset({Code.OWNED, Code.OPERATION_IN_PROGRESS})
_HAVE_A_PLACE = frozenset([N_CTX, N_SEQ, KV_UNIFIED, "--model", "--host", "--port"])
"""Options whose value is in the request, wherever it came from."""


@dataclass
class _Run:
    """One run that is connected. `named`: it was told of its engine, or `over`."""

    said: asyncio.Queue[RunMessage] = field(default_factory=asyncio.Queue)
    named: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    engine_began: datetime | None = None

    def end(self) -> None:
        self.over.set()
        self.named.set()


class Runs:
    """Every run that is connected. `submit` and `post` lead to the daemon's loop."""

    def __init__(
        self,
        paths: Paths,
        snapshot: Callable[[], Snapshot],
        configured: Callable[[], str | None],
        submit: Submit,
        post: Callable[[ev.Event], None],
    ) -> None:
        self._paths, self._snapshot, self._configured = paths, snapshot, configured
        self._submit, self._post = submit, post
        self._runs: dict[str, _Run] = {}

    def tell(self, name: str, message: RunMessage) -> None:
        """Say this to the run, if it is still there."""
        run = self._runs.get(name)
        if run is None:
            return
        if (engine := message.instance_id) is not None:
            socket = self._paths.engine_dir(engine) / "engine.sock"
            message = message.model_copy(update={"socket": str(socket)})
            run.engine_began = instances.began(self._paths, engine)
            run.named.set()
        run.said.put_nowait(message)
        if message.is_last:
            run.end()

    def log(self, name: str, count: int, since: datetime | None) -> AsyncIterator[bytes]:
        """Yield the log of the run's engine, of no other, to the end of the run.

        Raises `not_found`.
        """
        if name not in self._runs:
            raise error(Code.NOT_FOUND, f"there is no run {name!r}")
        return self._log(self._runs[name], count, since)

    async def _log(self, run: _Run, count: int, since: datetime | None) -> AsyncIterator[bytes]:
        await run.named.wait()
        if run.engine_began is None:
            return
        since = run.engine_began if since is None else max(since, run.engine_began)
        path = self._paths.engine_log
        async for chunk in logs.read(path, count, follow=True, since=since, until=run.over):
            yield chunk

    def close(self) -> None:
        """End every stream once what was said is sent: there is no daemon any more."""
        for run in self._runs.values():
            run.end()

    async def watch_pressure(self) -> None:
        """Say so, again and again, while memory is short and an engine lingers."""
        while True:
            await asyncio.sleep(PRESSURE_POLL_S)
            snapshot = self._snapshot()
            if snapshot.lingering is not None and snapshot.owner is None:
                found = await asyncio.to_thread(pressure.memory)
                if found is not None and found >= snapshot.settings.linger_pressure:
                    self._post(ev.Pressure())

    async def serve(self, asked: RunRequest, pid: int) -> AsyncIterator[bytes]:
        """Yield what the run is told, line by line. To stop to listen is to leave the engine."""
        names: list[str] = []
        try:
            wanted, linger_s = await asyncio.to_thread(self._read, asked, pid)
            run = await self._take(asked, wanted, linger_s, pid, names)
            yield _line(RunMessage(event="accepted", run=run))
            async with contextlib.aclosing(self._listen(run)) as messages:
                async for message in messages:
                    yield _line(message)
        except LlamactlError as exc:
            yield _line(RunMessage(event="refused", problem=Problem.of(exc)))
        finally:
            for name in names:
                if (gone := self._runs.pop(name, None)) is not None:
                    gone.end()
                self._post(ev.Left(name))

    async def _take(
        self,
        asked: RunRequest,
        wanted: ev.Apply | None,
        linger_s: float,
        pid: int,
        names: list[str],
    ) -> str:
        """Return the name of the run once it is the owner; wait for another that is just ending."""
        deadline = time.monotonic() + self._snapshot().settings.takeover_s

        def command(name: str) -> ev.Command:
            names.append(name)
            self._runs[name] = _Run()
            owner = Owner(id=name, pid=pid, host=asked.host, port=asked.port, linger_s=linger_s)
            apply = None if wanted is None else replace(wanted, operation=name)
            return ev.Run(name, owner, apply, asked.instance_id)

        while True:
            try:
                await self._submit(OperationKind.RUN, who(pid), command)
            except LlamactlError as exc:
                if exc.code not in WAITED_FOR or time.monotonic() > deadline:
                    raise
                self._runs.pop(names.pop())
                await asyncio.sleep(RETRY_S)
            else:
                return names[-1]

    async def _listen(self, name: str) -> AsyncGenerator[RunMessage, None]:
        """Yield what the run is told; while that is nothing, what it waits for."""
        run, waits = self._runs[name], None
        getting = asyncio.create_task(run.said.get())
        ending = asyncio.create_task(run.over.wait())
        try:
            while not (run.said.empty() and run.over.is_set() and not getting.done()):
                within_s = None if run.named.is_set() else NOTICE_S
                both = {getting, ending}
                await asyncio.wait(both, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
                if getting.done():
                    message = getting.result()
                    getting = asyncio.create_task(run.said.get())
                    yield message
                    if message.is_last:
                        return
                elif not run.named.is_set() and waits != (now := waiting(self._snapshot(), name)):
                    waits = now
                    if now is not None:
                        yield RunMessage(event="notice", text=now)
        finally:
            for task in (getting, ending):
                task.cancel()
            await asyncio.gather(getting, ending, return_exceptions=True)

    # --- what is asked for; in a thread ----------------------------------------------------------

    def _read(self, asked: RunRequest, pid: int) -> tuple[ev.Apply | None, float]:
        """Return what the command line comes to, and how long its engine lingers."""
        callers.require_same_users(pid)
        settings = self._snapshot().settings
        if asked.instance_id is not None:
            linger_s = settings.linger_s if asked.linger_s is None else asked.linger_s
            return None, linger_s
        engine = asked.engine_path or self._known_engine()
        callers.require_same_files(pid, [asked.context.cwd, engine])
        plain, secrets = _sorted_out(asked.context.env)
        context = asked.context.model_copy(update={"env": plain})
        env = launch.whole_env(os.environ, context, secrets)
        try:
            answer = args.ask([engine, *asked.argv], env, Path(context.cwd))
        except LlamactlError as exc:
            raise _unpatched(exc, engine) if exc.code == Code.NOT_SUPPORTED else exc from None
        foreign = command_line.read(engine, asked.argv, answer, context.cwd)
        _relayed(asked, foreign)
        named = [foreign.request.spec.model, *named_files(answer)]
        callers.require_same_files(pid, [posixpath.join(context.cwd, each) for each in named])
        if foreign.hf_token is not None:
            secrets = secrets | {"HF_TOKEN": foreign.hf_token}
        if foreign.api_keys:
            known = [secrets["LLAMA_API_KEY"]] if secrets.get("LLAMA_API_KEY") else []
            secrets = secrets | {"LLAMA_API_KEY": ",".join([*known, *foreign.api_keys])}
        request = foreign.request.model_copy(
            update={"context": self._kept(_without_ours(context, answer), secrets)}
        )
        spec = preflight.asked(request, None, self._paths, os.environ)
        apply = ev.Apply("", request, spec, who(pid), overcommit=asked.overcommit)
        if asked.linger_s is not None:
            return apply, asked.linger_s
        return apply, 0.0 if on_gpu(answer, engine, env) else settings.linger_s

    def _kept(self, context: ProcessContext, secrets: Mapping[str, str]) -> ProcessContext:
        snapshot = self._snapshot()
        others = (snapshot.running, snapshot.desired)
        keep = [each.context.secrets for each in others if each and each.context]
        name = caller_secrets.write(self._paths, secrets, keep)
        return context.model_copy(update={"secrets": name})

    def _known_engine(self) -> str:
        desired = self._snapshot().desired
        known = self._configured() or (None if desired is None else desired.engine_path)
        if known is None:
            raise error(
                Code.ENGINE_UNKNOWN,
                "no llama-server is known yet",
                hint="`llamactl build` prints the path of one: llamactl run -- PATH ARGS...",
            )
        return known


def on_gpu(answer: ArgsAnswer, engine: str, env: Mapping[str, str]) -> bool:
    """Whether the engine has weights where somebody else may have been promised the memory."""
    if not offload.asked(answer):
        return False
    return offload.remote(answer) or args.has_devices(engine, env)


def _relayed(asked: RunRequest, foreign: Foreign) -> None:
    """Refuse a caller that relays another address than llama-server's. Raises `address_differs`.

    He reads his command line and environment alone; the engine has read its own files as well.
    """
    if foreign.host == asked.host and foreign.port in {0, asked.port}:
        return
    raise error(
        Code.ADDRESS_DIFFERS,
        f"llama-server would listen on {foreign.host} port {foreign.port}, "
        f"and not on {asked.host} port {asked.port}",
        hint="its config.ini says so, or a variable: --host and --port win over both",
        details={"host": foreign.host, "port": foreign.port},
    )


def _sorted_out(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables without the secrets, and the secrets."""
    secrets = {name: value for name, value in env.items() if caller_secrets.is_secret(name)}
    return {name: value for name, value in env.items() if name not in secrets}, secrets


def _without_ours(context: ProcessContext, answer: ArgsAnswer) -> ProcessContext:
    """Leave out the variables of options that have their place in the request."""
    ours = {option.env for option in answer.options if option.name in _HAVE_A_PLACE}
    env = {name: value for name, value in context.env.items() if name not in ours}
    return context.model_copy(update={"env": env})


def _unpatched(exc: LlamactlError, engine: str) -> LlamactlError:
    return error(
        Code.ENGINE_UNPATCHED,
        f"{engine} is no patched llama-server: it cannot be reconfigured",
        hint="`llamactl run -- llama-server` has llamactl's own; --passthrough runs this one plain",
        details=exc.details,
    )


def _line(message: RunMessage) -> bytes:
    return message.model_dump_json().encode() + b"\n"
