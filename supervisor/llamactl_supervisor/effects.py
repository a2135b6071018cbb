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
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from llamactl_supervisor import events as ev
from llamactl_supervisor import (
    instances,
    keys,
    launch,
    ledger,
    planner,
    ports,
    preflight,
    process,
    procfs,
)
from llamactl_supervisor.carrier import Carrier
from llamactl_supervisor.engine import EngineClient
from llamactl_supervisor.errors import Code, LlamactlError, error
from llamactl_supervisor.models import After, Intent, LoadLine, OperationKind, Problem, Stranger
from llamactl_supervisor.observer import Observer
from llamactl_supervisor.process import Process

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Coroutine

    from llamactl_supervisor.events import EngineFacts, EngineProcess, Event
    from llamactl_supervisor.models import (
        ApplyPlan,
        ExitRecord,
        FileReceipt,
        Override,
        PageReceipt,
        ProcessIdentity,
        Receipt,
        UpRequest,
    )
    from llamactl_supervisor.paths import Paths
    from llamactl_supervisor.settings import Settings
    from llamactl_supervisor.spec import EngineSpec
    from llamactl_supervisor.store import Saved

    Ended = tuple[EngineProcess, ExitRecord]

log = logging.getLogger("llamactl.effects")

HOLDER_START_S = 30.0
"""How long a holder may take to start the engine's process, be the machine as busy as it may."""
_MAY_PASS = frozenset({Code.FILE_UNREADABLE, Code.OUT_OF_RESOURCES})
"""Why an engine cannot be started that the next try may not find."""
_SIGNALS = {ev.Ladder.TERM: signal.SIGTERM, ev.Ladder.KILL: signal.SIGKILL}


@dataclass(frozen=True)
class Remains:
    """What a predecessor left: the state, with what was found added to it, and its engine.

    `ended`: the engine that was to go on and did not, and how it ended.
    """

    saved: Saved
    engine: EngineProcess | None
    ended: Ended | None


class Effects:
    """The daemon's hands. `post` takes the events back to its loop, `now` is its clock."""

    def __init__(
        self,
        paths: Paths,
        settings: Settings,
        post: Callable[[Event], None],
        now: Callable[[], float],
    ) -> None:
        self._paths, self._settings, self._post, self._now = paths, settings, post, now
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._clients: dict[str, EngineClient] = {}
        self._strangers: tuple[EngineProcess, ...] = ()
        self.carrier = Carrier(paths, lambda: self._settings, post, self.client)

    def use(self, settings: Settings) -> None:
        """Go on with other settings; what waits by the old ones waits on."""
        self._settings = settings

    def unproven(self) -> tuple[EngineProcess, ...]:
        """Return the engines that may be ours, are not provably so, and still run."""
        return tuple(found for found in self._strangers if procfs.alive(found.engine))

    def strangers(self) -> tuple[Stranger, ...]:
        """Return the same, as they are shown."""
        return tuple(
            Stranger(pid=found.engine.pid, instance_id=found.instance_id)
            for found in self.unproven()
        )

    def find(self, saved: Saved) -> Remains:
        """Return what the predecessor left; sweep what is dead.

        Proven: the engine's record, in a directory that only we can enter, names that directory's
        instance, and that very process (pid, start, boot) is alive. Ours is the one that the saved
        state names; where it names none that lives (it was lost, say), the only one that is proven.
        One whose command line names our directory, and no more, is unproven.
        """
        known = {
            each.instance_id: each
            for each in (*saved.unproven, *([] if saved.process is None else [saved.process]))
            if procfs.alive(each.engine)
        }
        ended = self._ended(saved)
        claimed = {each.instance_id: each for each in instances.claimed(self._paths)}
        proven: dict[str, EngineProcess] = {}
        for name in list(instances.names(self._paths)):
            found = instances.read(self._paths, name)
            if found is None and name not in known and name not in claimed:
                found = instances.fence(self._paths, name)
            if found is None:
                continue
            if procfs.alive(found.engine):
                # A record of another instance proves nothing.
                (proven if found.instance_id == name else known)[name] = found
                continue
            record = instances.exit_record(self._paths, name)
            log.warning("engine ended unwatched pid=%d: %s", found.engine.pid, record.summary)
            instances.remove(self._paths, name)
        lost = {name: each for name, each in (claimed | known).items() if name not in proven}
        if saved.instance_id not in proven and len(proven) == 1 and not lost:
            saved = self._recovered(saved, *proven.values())
        ours = None
        if saved.instance_id is not None and saved.desired is not None:
            ours = proven.pop(saved.instance_id, None)
        if ours is not None:
            held = ours.holder is not None and procfs.alive(ours.holder)
            holder = ours.holder if held else None
            ours = ours.model_copy(update={"adopted": True, "holder": holder})
        self._strangers = (*proven.values(), *lost.values())
        for each in self._strangers:
            pid = each.engine.pid
            log.error("unproven engine pid=%d instance=%s: left alone", pid, each.instance_id)
        return Remains(saved, ours, None if ours is not None else ended)

    def _ended(self, saved: Saved) -> Ended | None:
        """Return how the engine ended that the state names, if it was not to end.

        One of another boot ended with its machine, which is no fault of its own.
        """
        lost, name = saved.process, saved.instance_id
        if saved.intent is Intent.DOWN or name is None or saved.stopping is After.START:
            return None
        found = instances.read(self._paths, name) or lost
        if found is None or procfs.alive(found.engine):
            return None
        this_boot = found.engine.boot_id == procfs.boot_id()
        if not this_boot or instances.ended_by_hand(self._paths, name):
            return None
        return found, instances.exit_record(self._paths, name)

    def _recovered(self, saved: Saved, found: EngineProcess) -> Saved:
        """Return the state with what it lacks of an engine that is proven, as far as that is known.

        The ledger says how often it has loaded: everything that was since it began.
        """
        asked = instances.asked(self._paths, found.instance_id)
        if asked is None:
            return saved
        log.warning("engine pid=%d: proven by its record, not by the state", found.engine.pid)
        began = datetime.now(UTC) - timedelta(seconds=procfs.uptime_s(found.engine) + 1)
        lines = ledger.read(self._paths.ledger_file, since=began).lines
        loads = sum(isinstance(line, LoadLine) and line.loaded for line in lines)
        return saved.model_copy(
            update={
                "intent": Intent.UP,
                "generation": max(saved.generation, asked.generation),
                "desired": asked.request,
                "running": asked.request,
                "running_spec": asked.spec,
                "override": asked.override,
                "instance_id": found.instance_id,
                "process": found,
                "failed": None,
                "stopping": None,
                "loads_recorded": loads,
            }
        )

    async def check(self, request: UpRequest, override: Override | None) -> EngineSpec | None:
        """Return what this engine is asked to be, or raise why not; see `preflight.check`."""
        return await asyncio.to_thread(preflight.check, request, override, self._paths, os.environ)

    async def asked(self, request: UpRequest) -> EngineSpec:
        """Return what this engine is asked to be; see `preflight.asked`."""
        return await asyncio.to_thread(preflight.asked, request, None, self._paths, os.environ)

    async def plan(self, effect: ev.PlanApply) -> ApplyPlan:
        """Return what an apply comes to; see `planner.plan`."""
        return await planner.plan(effect, self._paths, self.client)

    async def plan_apply(self, effect: ev.PlanApply) -> None:
        """Find out what an apply comes to and post that, or why it cannot be."""
        found: ApplyPlan | Problem
        try:
            found = await self.plan(effect)
        except LlamactlError as exc:
            found = Problem.of(exc)
        self._post(ev.Planned(effect.command.operation, found))

    async def rebase(self, effect: ev.Rebase) -> None:
        """Ask what another request of an apply is taken for and post that, or why it is not."""
        spec: EngineSpec | Problem
        try:
            spec = await self.asked(effect.request)
        except LlamactlError as exc:
            spec = Problem.of(preflight.apply_refused(exc))
        self._post(ev.Rebased(effect.operation, effect.request, spec))

    async def spawn(self, effect: ev.Spawn, refusal: LlamactlError | None) -> None:
        """Start holder and engine, unless there is a reason not to."""
        checked = False
        try:
            spec = await self.check(effect.request, effect.override)
            checked = True
            if refusal is not None:
                raise refusal
            started = await self._start(effect, spec, quiet=await self._quiet(effect))
        except LlamactlError as exc:
            instances.remove(self._paths, effect.instance_id)
            jitter = random.random()
            final = not checked and exc.code not in _MAY_PASS
            self._post(ev.SpawnFailed(effect.generation, Problem.of(exc), jitter, final=final))
        else:
            self._post(ev.Spawned(effect.generation, started, spec))

    async def _quiet(self, effect: ev.Spawn) -> bool:
        """Say whether the engine is to begin quiet: files hold conversations for it."""
        if not await self.carrier.awaited():
            return False
        able = await self.carrier.takes(effect.request)
        if not able:
            log.warning("conversations stay in files: the engine cannot begin quiet")
        return able

    async def look_for_files(self, effect: ev.LookForFiles) -> None:
        """Say whether the files that the engine needs are there by now."""
        there = True
        try:
            await asyncio.to_thread(preflight.files, effect.request)
        except LlamactlError:
            there = False
        self._post(ev.LookedForFiles(effect.generation, there=there))

    async def _start(
        self, effect: ev.Spawn, spec: EngineSpec | None, *, quiet: bool
    ) -> EngineProcess:
        for stranger in self.strangers():
            raise error(
                Code.ENGINE_UNPROVEN,
                f"an engine that is not provably ours runs with pid {stranger.pid}; "
                "it is neither used nor killed, and no second one is started beside it",
                hint=f"see `llamactl orphans`; end it yourself if it is not needed: "
                f"kill {stranger.pid}",
                details={"pid": stranger.pid, "instance_id": stranger.instance_id},
            )
        wanted = effect.request.spec
        if effect.request.context is None:
            await ports.check_free(wanted.host, wanted.port)
        try:
            self._paths.create()  # a runtime directory ends with its user's last login
            instances.create(
                self._paths,
                effect.instance_id,
                instances.Asked(
                    generation=effect.generation,
                    request=effect.request,
                    override=effect.override,
                    spec=spec,
                ),
            )
            order = await asyncio.to_thread(self._order, effect, quiet=quiet)
            within_s = min(HOLDER_START_S, self._settings.ready_stall_s)
            holder, errno = await asyncio.to_thread(process.start_holder, order, within_s)
        except OSError as exc:
            await self._undo(effect.instance_id)
            raise error(
                Code.ENGINE_SPAWN_FAILED,
                f"the engine's holder could not be started: {exc.strerror or exc}",
            ) from exc
        started = instances.read(self._paths, effect.instance_id)
        if started is None or errno:
            await asyncio.to_thread(holder.wait)
            why = f"its holder exited ({holder.returncode})"
            if errno:
                number, _, part = errno.decode(errors="replace").partition(" ")
                why = os.strerror(int(number)) + (f" ({part} of the caller)" if part else "")
            path = effect.request.engine_path
            raise error(
                Code.ENGINE_SPAWN_FAILED,
                f"{path} could not be run: {why}",
                hint="check the path; `llamactl build` prints the path of llamactl's own",
                details={"engine_path": path},
            )
        self._holders[effect.instance_id] = holder
        return started

    async def _undo(self, instance_id: str) -> None:
        """End the engine that a holder released and did not tell of."""
        started = instances.read(self._paths, instance_id)
        if started is not None and process.send(started.engine, signal.SIGKILL):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._end(started.engine), self._settings.holder_exit_s)

    def _order(self, effect: ev.Spawn, *, quiet: bool) -> dict[str, Any]:
        """Return what the holder is told; the engine's keys are in their file then."""
        name, paths = effect.instance_id, self._paths
        users, context = effect.request.spec.api_key_file, effect.request.context
        env = preflight.environment(effect.request, paths, os.environ)
        file = keys.write(paths.engine_dir(name), users, env)
        argv = launch.engine_argv(effect.request, effect.override, name, paths, file, quiet=quiet)
        return launch.holder_order(argv, env, name, paths, self._settings, context)

    def signal(self, effect: ev.Signal) -> None:
        """Signal the engine, if it is still that engine."""
        number = _SIGNALS[effect.step]
        sent = process.send(effect.process.engine, number)
        log.info("signal=%s pid=%d sent=%s", number.name, effect.process.engine.pid, sent)

    def attend(
        self, effect: ev.Watch | ev.CarryOut | ev.CarryCut | ev.CarryIn | ev.CarryOff
    ) -> Coroutine[None, None, None]:
        """Return what stays with the engine: until its end, or until conversations are carried."""
        return self.watch(effect) if isinstance(effect, ev.Watch) else self.carrier.run(effect)

    async def watch(self, effect: ev.Watch) -> None:
        """Observe the engine until its end; then collect how it ended.

        A bug in what runs beside that is raised, and not waited for.
        """
        name, generation = effect.process.instance_id, effect.generation
        directory = self._paths.engine_dir(name)
        client = EngineClient(effect.process, directory / "engine.sock", keys.ours(directory))
        self._clients[name] = client
        holder = asyncio.create_task(self._watch_holder(effect))
        observer = Observer(
            self._paths, lambda: self._settings, self._post, self._now, generation, client
        )
        seeing = asyncio.create_task(observer.run())
        try:
            await self._end(effect.process.engine, holder, seeing)
            seeing.cancel()
            await self._collect(effect, holder)
        finally:
            for task in (holder, seeing):
                task.cancel()
            await asyncio.gather(holder, seeing, return_exceptions=True)
            await self._clients.pop(name).close()

    async def _collect(self, effect: ev.Watch, holder: asyncio.Task[None]) -> None:
        """Post how the engine ended, and once more if its holder says it too late.

        A daemon that ends before it has posted that leaves the directory to the next one.
        """
        name = effect.process.instance_id
        await asyncio.wait({holder}, timeout=self._settings.holder_exit_s)
        told = instances.exit_record(self._paths, name)
        self._post(ev.Exited(effect.generation, told, random.random()))
        try:
            if not holder.done():
                self._wake_holder(effect.process)
            await holder
            record = instances.exit_record(self._paths, name)
            if record.summary != told.summary:
                log.info("engine pid=%d %s", effect.process.engine.pid, record.summary)
                self._post(ev.LastWords(told, record))
        finally:
            if not holder.done() and effect.process.holder is not None:
                process.send(effect.process.holder, signal.SIGKILL)
            instances.remove(self._paths, name)

    @staticmethod
    def _wake_holder(ended: EngineProcess) -> None:
        """Have a holder end that does not: it may be stopped, and nobody needs it any more."""
        if ended.holder is not None:
            pid = ended.holder.pid
            log.warning("holder pid=%d of engine pid=%d does not end: CONT", pid, ended.engine.pid)
            process.send(ended.holder, signal.SIGCONT)

    @staticmethod
    async def _end(identity: ProcessIdentity, *beside: asyncio.Task[None]) -> None:
        """Return at the process's end; raise what a task beside it raises before that."""
        engine = Process.open(identity)
        if engine is None:
            return
        gone = asyncio.create_task(engine.gone())
        left = {gone, *beside}
        try:
            while not gone.done():
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            engine.close()

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
        if procfs.alive(effect.process.engine):
            log.error("holder lost: pid=%d runs on without a log", effect.process.engine.pid)
            self._post(ev.HolderLost(effect.generation))

    async def reconfigure(self, effect: ev.SendReconfigure, by: str) -> None:
        """Ask the engine for another geometry and post its answer, or why there is none."""
        try:
            receipt = await self._reconfigure(effect)
        except LlamactlError as exc:
            if procfs.alive(effect.process.engine):  # else its end is told, and says why
                self._post(ev.ReconfigureFailed(effect.generation, Problem.of(exc)))
        else:
            at = datetime.now(UTC)
            done = ev.Reconfigured(effect.generation, effect.change, receipt, by, at)
            self._post(done)

    async def page(self, effect: ev.SendPage) -> None:
        """Ask the engine for a page verb and post its answer, or why there is none."""
        outcome: PageReceipt | FileReceipt | Problem
        try:
            client, command = self.client(effect.process), effect.command
            if isinstance(command, ev.PageFile):
                outcome = await client.page_file(command)
            elif command.kind is OperationKind.PAGE_DROP and (
                dropped := await self.carrier.drop(command.name)
            ):
                outcome = dropped
            else:
                outcome = await client.page(command)
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
        client = self.client(effect.process)
        before = await client.props()
        try:
            return await client.reconfigure(effect.change)
        except LlamactlError as exc:
            if exc.code not in {Code.ENGINE_UNREACHABLE, Code.ENGINE_ANSWER_BROKEN}:
                raise
            # The answer is lost, the change may not be: the engine's own record settles it.
            after = await self._settle(client)
            if after is None or after.last_reconfigure in (None, before.last_reconfigure):
                if after is not None or not await process.ends(effect.process.engine):
                    exc.hint = "the engine may still make the change; `llamactl status` will tell"
                raise
            return after.last_reconfigure

    @staticmethod
    async def _settle(client: EngineClient) -> EngineFacts | None:
        try:
            return await client.props()
        except LlamactlError:
            return None
