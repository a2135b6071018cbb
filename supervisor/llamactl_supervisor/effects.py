"""What is done to the engine: start, watch, signal, reconfigure, page; each posts what came.

Nothing here decides anything. Every method that takes time runs as a task of the daemon and ends
in an event that carries its generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from llamactl_supervisor import events as ev
from llamactl_supervisor import instances, keys, launch, ports, preflight, process
from llamactl_supervisor.engine import EngineClient
from llamactl_supervisor.errors import Code, LlamactlError, error
from llamactl_supervisor.models import Problem, Stranger
from llamactl_supervisor.observer import Observer
from llamactl_supervisor.process import Process

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from llamactl_supervisor.events import EngineFacts, EngineProcess, Event
    from llamactl_supervisor.models import FileReceipt, Override, PageReceipt, Receipt, UpRequest
    from llamactl_supervisor.paths import Paths
    from llamactl_supervisor.settings import Settings
    from llamactl_supervisor.store import Saved

log = logging.getLogger("llamactl.effects")

_SIGNALS = {ev.Ladder.TERM: signal.SIGTERM, ev.Ladder.KILL: signal.SIGKILL}


class Effects:
    """The daemon's hands. `post` takes the events back to its loop."""

    def __init__(self, paths: Paths, settings: Settings, post: Callable[[Event], None]) -> None:
        self._paths, self._settings, self._post = paths, settings, post
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._clients: dict[str, EngineClient] = {}
        self._strangers: dict[str, EngineProcess] = {}

    def use(self, settings: Settings) -> None:
        """Go on with other settings; what waits by the old ones waits on."""
        self._settings = settings

    def strangers(self) -> tuple[Stranger, ...]:
        """Return the engines in our directories that are not provably ours and still run."""
        return tuple(
            Stranger(pid=found.engine.pid, instance_id=name)
            for name, found in self._strangers.items()
            if process.alive(found.engine)
        )

    def find(self, saved: Saved) -> EngineProcess | None:
        """Return the predecessor's engine if it runs and is proven ours; sweep what is dead.

        Proven: its holder's record, in a directory that only we can enter, names the instance
        that the saved state names, and that very process (pid, start, boot) is alive.
        """
        ours: EngineProcess | None = None
        for name in list(instances.names(self._paths)):
            found = instances.read(self._paths, name) or instances.fence(self._paths, name)
            if found is None:
                continue
            if not process.alive(found.engine):
                record = instances.exit_record(self._paths, name)
                log.warning("engine ended unwatched pid=%d: %s", found.engine.pid, record.summary)
                instances.remove(self._paths, name)
            elif name == saved.instance_id and saved.desired is not None:
                held = found.holder is not None and process.alive(found.holder)
                holder = found.holder if held else None
                ours = found.model_copy(update={"adopted": True, "holder": holder})
            else:
                self._strangers[name] = found
        lost = saved.process
        if lost is not None and ours is None and process.alive(lost.engine):
            self._strangers[lost.instance_id] = lost
        for name, found in self._strangers.items():
            log.error("unproven engine pid=%d instance=%s: left alone", found.engine.pid, name)
        return ours

    async def check(self, request: UpRequest, override: Override | None) -> None:
        """Raise why this engine could not be started; see `preflight.check`."""
        await asyncio.to_thread(preflight.check, request, override, self._paths, os.environ)

    async def spawn(self, effect: ev.Spawn, refusal: LlamactlError | None) -> None:
        """Start holder and engine, unless there is a reason not to."""
        final = True
        try:
            await self.check(effect.request, effect.override)
            final = False
            if refusal is not None:
                raise refusal
            started = await self._start(effect)
        except LlamactlError as exc:
            instances.remove(self._paths, effect.instance_id)
            jitter = random.random()
            self._post(ev.SpawnFailed(effect.generation, Problem.of(exc), jitter, final=final))
        else:
            self._post(ev.Spawned(effect.generation, started))

    async def _start(self, effect: ev.Spawn) -> EngineProcess:
        for stranger in self.strangers():
            raise error(
                Code.ENGINE_UNPROVEN,
                f"an engine that is not provably ours runs with pid {stranger.pid}; "
                "it is neither used nor killed, and no second one is started beside it",
                hint=f"end it yourself if it is not needed: kill {stranger.pid}",
                details={"pid": stranger.pid, "instance_id": stranger.instance_id},
            )
        spec = effect.request.spec
        await ports.check_free(spec.host, spec.port)
        try:
            instances.create(self._paths, effect.instance_id)
            order = await asyncio.to_thread(self._order, effect)
            holder, errno = await asyncio.to_thread(process.start_holder, order)
        except OSError as exc:
            raise error(
                Code.ENGINE_SPAWN_FAILED, f"the engine's holder could not be started: {exc}"
            ) from exc
        started = instances.read(self._paths, effect.instance_id)
        if started is None or errno:
            await asyncio.to_thread(holder.wait)
            why = os.strerror(int(errno)) if errno else f"its holder exited ({holder.returncode})"
            path = effect.request.engine_path
            raise error(
                Code.ENGINE_SPAWN_FAILED,
                f"{path} could not be run: {why}",
                hint="build the engine with `llamactl build`",
                details={"engine_path": path},
            )
        self._holders[effect.instance_id] = holder
        return started

    def _order(self, effect: ev.Spawn) -> dict[str, Any]:
        """Return what the holder is told; the engine's keys are in their file then."""
        name, paths = effect.instance_id, self._paths
        users = effect.request.spec.api_key_file
        file = keys.write(paths.engine_dir(name), users, os.environ)
        argv = launch.engine_argv(effect.request, effect.override, name, paths, file)
        return launch.holder_order(argv, os.environ, name, paths, self._settings)

    def signal(self, effect: ev.Signal) -> None:
        """Signal the engine, if it is still that engine."""
        number = _SIGNALS[effect.step]
        sent = process.send(effect.process.engine, number)
        log.info("signal=%s pid=%d sent=%s", number.name, effect.process.engine.pid, sent)

    async def watch(self, effect: ev.Watch) -> None:
        """Observe the engine until its end; then collect how it ended."""
        name, generation = effect.process.instance_id, effect.generation
        directory = self._paths.engine_dir(name)
        client = EngineClient(effect.process, directory / "engine.sock", keys.ours(directory))
        self._clients[name] = client
        engine = Process.open(effect.process.engine)
        holder = asyncio.create_task(self._watch_holder(effect))
        observer = Observer(self._paths, lambda: self._settings, self._post, generation, client)
        seeing = asyncio.create_task(observer.run())
        try:
            if engine is not None:
                await engine.gone()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(holder, self._settings.holder_exit_s)
            record = instances.exit_record(self._paths, name)
            instances.remove(self._paths, name)
            self._post(ev.Exited(generation, record, random.random()))
        finally:
            for task in (holder, seeing):
                task.cancel()
            await asyncio.gather(holder, seeing, return_exceptions=True)
            if engine is not None:
                engine.close()
            await self._clients.pop(name).close()

    async def _watch_holder(self, effect: ev.Watch) -> None:
        identity = effect.process.holder
        holder = None if identity is None else Process.open(identity)
        if holder is not None:
            try:
                await holder.gone()
            finally:
                holder.close()
        child = self._holders.pop(effect.process.instance_id, None)
        if child is not None:
            child.wait()
        if process.alive(effect.process.engine):
            log.error("holder lost: pid=%d runs on without a log", effect.process.engine.pid)
            self._post(ev.HolderLost(effect.generation))

    async def reconfigure(self, effect: ev.SendReconfigure, by: str) -> None:
        """Ask the engine for another geometry and post its answer, or why there is none."""
        try:
            receipt = await self._reconfigure(effect)
        except LlamactlError as exc:
            self._post(ev.ReconfigureFailed(effect.generation, Problem.of(exc)))
        else:
            at = datetime.now(UTC)
            done = ev.Reconfigured(effect.generation, effect.change, receipt, by, at)
            self._post(done)

    async def page(self, effect: ev.SendPage) -> None:
        """Ask the engine for a page verb and post its answer, or why there is none."""
        outcome: PageReceipt | FileReceipt | Problem
        try:
            client = self.client(effect.process)
            if isinstance(effect.command, ev.PageFile):
                outcome = await client.page_file(effect.command)
            else:
                outcome = await client.page(effect.command)
        except LlamactlError as exc:
            outcome = Problem.of(exc)
        self._post(ev.PageEnded(effect.command.operation, outcome))

    def client(self, engine: EngineProcess) -> EngineClient:
        """Return who talks to this engine; raises `engine_unreachable` once it is gone."""
        client = self._clients.get(engine.instance_id)
        if client is None:
            raise error(Code.ENGINE_UNREACHABLE, f"the engine is gone (pid {engine.engine.pid})")
        return client

    async def _reconfigure(self, effect: ev.SendReconfigure) -> Receipt:
        client = self._clients[effect.process.instance_id]
        before = await client.props()
        try:
            return await client.reconfigure(effect.change)
        except LlamactlError as exc:
            if exc.code not in {Code.ENGINE_UNREACHABLE, Code.ENGINE_ANSWER_BROKEN}:
                raise
            # The answer is lost, the change may not be: the engine's own record settles it.
            after = await self._settle(client)
            if after is None or after.last_reconfigure in (None, before.last_reconfigure):
                exc.hint = "the engine may still make the change; `llamactl status` will tell"
                raise
            return after.last_reconfigure

    @staticmethod
    async def _settle(client: EngineClient) -> EngineFacts | None:
        try:
            return await client.props()
        except LlamactlError:
            return None
