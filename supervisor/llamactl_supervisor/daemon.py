"""The one loop: events in, snapshot forward, effects out. Nothing else changes anything."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import uuid4

from llamactl_supervisor import (
    activation,
    applies,
    apply,
    asking,
    daemon_log,
    durable,
    groundwork,
    instances,
    ledger,
    locks,
    logs,
    preflight,
    reload,
    store,
    view,
)
from llamactl_supervisor import events as ev
from llamactl_supervisor.announcer import Announcer
from llamactl_supervisor.clock import Clock
from llamactl_supervisor.commands import not_serving
from llamactl_supervisor.effects import Effects
from llamactl_supervisor.errors import Code, ExitCode, LlamactlError, error
from llamactl_supervisor.fields import written
from llamactl_supervisor.following import WATCHED, Following
from llamactl_supervisor.listeners import LOOK_S, Listeners
from llamactl_supervisor.models import (
    ApplyRequest,
    ApplyResult,
    DaemonStatus,
    EngineState,
    OperationKind,
    Pages,
    Problem,
    RunMessage,
)
from llamactl_supervisor.notify import Notifier
from llamactl_supervisor.operations import Operations
from llamactl_supervisor.records import DAEMON, Records
from llamactl_supervisor.runs import Runs
from llamactl_supervisor.scrape import Scrape
from llamactl_supervisor.snapshot import SERVING, Snapshot, Step, doing, is_restart
from llamactl_supervisor.state import reduce

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from llamactl_supervisor.config import Config, Loaded
    from llamactl_supervisor.engine import EngineClient
    from llamactl_supervisor.models import (
        EngineLook,
        Ledger,
        Operation,
        OperationResult,
        RunningConfig,
        RunRequest,
        Slots,
        Status,
        UpRequest,
    )
    from llamactl_supervisor.spec import EngineSpec

log = logging.getLogger("llamactl.daemon")


class Daemon:
    """Supervises one engine for one runtime directory, until `down`, TERM, INT or USR2.

    TERM and INT stop the engine first, USR2 leaves it to the next daemon.
    """

    def __init__(
        self, loaded: Loaded, version: str, *, watch: bool = False, built: str | None = None
    ) -> None:
        paths, settings = loaded.paths, loaded.config.daemon
        self._loaded, self._paths, self._version = loaded, paths, version
        self._queue: asyncio.Queue[ev.Event | BaseException] = asyncio.Queue()
        self._operations = Operations()
        self._applying = asyncio.Lock()
        self._watching, self._built = watch, built
        self._accepted: dict[str, asyncio.Future[None]] = {}
        self._expires: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = asyncio.Event()
        self._clock = Clock()
        self._effects = Effects(paths, settings, self._queue.put_nowait, self._clock.now)
        self._records = Records(paths)
        self._scrape = Scrape(self._records.metrics, lambda: self._snapshot, self._engine)
        self._snapshot = Snapshot(seed=uuid4(), settings=settings)
        self._runs = Runs(
            paths,
            lambda: self._snapshot,
            lambda: self._loaded.config.engine.engine_path,
            self.submit,
            self._queue.put_nowait,
        )
        self._following = Following(
            *(loaded, lambda: self._snapshot, self._effects.check, self._queue.put_nowait),
            *(self.submit, self.apply, self._operations, self._records.metrics),
        )
        self._saved = store.Saved()
        self._unsaved: LlamactlError | None = None
        self._notifier = Notifier.take_from(os.environ)
        self._announcer = Announcer(self._notifier)
        self._about = DaemonStatus(
            pid=os.getpid(),
            version=version,
            started_at=datetime.now(UTC),
            control_socket=str(paths.control_socket),
            log_dir=str(paths.logs),
        )

    async def run(self, *, resume: bool) -> ExitCode:
        """Serve until the end. `resume`: load the engine of the configuration or saved intent.

        An engine that still runs is adopted in any case. Returns NOT_RUNNING after an engine that
        was given up. Raises `daemon_running`, `state_unreadable`, `insecure_directory`,
        `config_invalid` when the configuration names a model and nothing names a llama-server, and
        what `activation.inherited` and `Listeners` raise.
        """
        self._paths.create()
        with contextlib.closing(self._notifier), locks.held(self._paths) as owned:
            settings = self._loaded.config.daemon
            daemon_log.rotate(
                self._paths.daemon_log, settings.log_bytes_max, settings.log_files_max
            )
            self._load()
            handed = activation.inherited(os.environ, self._paths.control_socket)
            listeners = Listeners(
                *(self, self._version, self._paths.control_socket, handed),
                *(self._loaded.config.api, self._loaded.config.daemon.close_s),
            )
            await self._take_over(resume=resume)
            await self._serve(listeners, owned)
        failed = self._snapshot.state is EngineState.FAILED and not self._snapshot.closing
        return ExitCode.NOT_RUNNING if failed else ExitCode.OK

    def _load(self) -> None:
        self._saved, aside = store.load(self._paths.state_file)
        if aside is not None:
            log.error("state file made no sense; set aside as %s, starting afresh", aside)

    async def _take_over(self, *, resume: bool) -> None:
        config = self._loaded.config
        remains = self._effects.find(self._saved)
        found, known = remains.engine, remains.saved
        if known.baseline is None and known is not self._saved:
            # What the lost state had brought into force is not known: nothing counts as changed.
            known = known.model_copy(update={"baseline": config.engine})
        if found is not None and known.running_spec is None and known.running is not None:
            known = known.model_copy(update={"running_spec": await self._spec(known.running)})
        known_now = durable.snapshot_of(known, config.daemon, self._clock.now())
        self._snapshot = replace(known_now, built=self._built)
        if known.load_by is not None:
            self._records.spawned(known.load_by)
        if found is not None:
            log.info("adopting engine pid=%d instance=%s", found.engine.pid, found.instance_id)
            followed = self._watching
            await self._step(ev.Found(found, config, known.stopping, is_followed=followed))
            for change in () if followed else reload.unapplied(self._snapshot):
                why = "%s is %s, configured as %s: a reload or a restart of the engine takes it"
                log.warning(why, change.field, written(change.before), written(change.after))
            return
        if remains.ended is not None:
            await self._step(ev.FoundDead(*remains.ended))
        if resume:
            groundwork.require_engine(config, self._saved.desired, self._built)
        begun = known.load_by is not None and remains.ended is None
        await self._step(ev.Resume(config, load=resume, begun=begun))

    async def _spec(self, running: UpRequest) -> EngineSpec | None:
        """Return what an engine was asked to be of which that was not kept, as far as it shows."""
        try:
            return await self._effects.check(running, None)
        except LlamactlError as exc:
            log.warning("what the engine was asked to be is not known: %s", exc.message)
            return None

    async def _serve(self, listeners: Listeners, owned: locks.Held) -> None:
        listeners.start()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_end, number.name)
        loop.add_signal_handler(signal.SIGUSR2, self._queue.put_nowait, ev.HandOver())
        loop.add_signal_handler(signal.SIGHUP, self._asked_to_reload, signal.SIGHUP.name)
        self._start(self._announcer.keep_alive())
        self._start(self._runs.watch_pressure())
        if self._watching:
            self._start(self._following.watch())
        self._start(self._clock.run())
        self._start(self._keep_reachable(listeners, owned))
        self._start(self._keep_state(owned))
        self._announcer.follow(self._snapshot)
        try:
            while not self._ending.is_set():
                await self._step(await self._next())
                self._announcer.follow(self._snapshot, self._about.problem)
            await self._operations.told(self._snapshot.settings.close_s)
        finally:
            self._ending.set()
            listeners.vanish()
            self._runs.close()
            self._operations.close()
            for future in self._accepted.values():
                future.set_exception(error(Code.SHUTTING_DOWN, "the daemon is shutting down"))
            await listeners.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            log.info("ended")

    async def _keep_reachable(self, listeners: Listeners, owned: locks.Held) -> None:
        async for problem in listeners.keep(owned):
            self._about = self._about.model_copy(update={"problem": problem})
            self._announcer.follow(self._snapshot, problem)

    async def _keep_state(self, owned: locks.Held) -> None:
        """Make locks and state again where they were removed: no second daemon may come of it."""
        while True:
            await asyncio.sleep(LOOK_S)
            if owned.whole():
                continue
            try:
                self._paths.create()
                owned.renew()
            except (OSError, LlamactlError) as exc:
                log.error("%s is gone and cannot be made again: %s", self._paths.state, exc)
                continue
            log.warning("%s or its locks were gone: made again", self._paths.state)
            self._saved = store.Saved()
            self._queue.put_nowait(ev.Tick())  # which saves

    async def _next(self) -> ev.Event:
        """Return the next event; a deadline that passes is one, after those that came before it."""
        deadline = self._snapshot.due
        left_s = None if deadline is None else max(0.0, deadline - self._clock.now())
        try:
            event = await asyncio.wait_for(self._queue.get(), left_s)
        except TimeoutError:
            event = ev.Tick() if self._queue.empty() else self._queue.get_nowait()
        if isinstance(event, BaseException):
            raise event
        return event

    async def _step(self, event: ev.Event) -> None:
        """Reduce one event; save what must outlive us before anything is done or told about it.

        What cannot be saved is done all the same, except for the end of an engine that serves and
        whose successor would not be started for that very reason.
        """
        before = replace(self._snapshot, unproven=self._effects.unproven())
        if (late := self._expired(event)) is None:
            after, effects = reduce(before, event, self._clock.now())
        else:
            after, effects = before, (late,)
        load_by = self._records.by
        self._loads_for(before, event, after, effects)
        ends_engine = before.state in SERVING and is_restart(after)
        await self._save(after, prove=ends_engine)
        if ends_engine and self._unsaved is not None:
            refused = self._not_begun(before, event, self._unsaved, self._clock.now())
            after, effects = refused or (after, effects)
            await self._save(after)
        self._snapshot = after
        if (applying := after.applying) is not None and applying is not before.applying:
            for each in (*applying.older, applying.command):
                self._operations.planned(each.operation, applying.plan)
        await self._carry_out(effects, load_by)
        if isinstance(event, ev.Command) and (future := self._accepted.pop(event.operation, None)):
            future.set_result(None)
        for name in after.waiting:
            self._operations.progress(name, doing(after))
        if before.state is not after.state:
            self._records.state(before, after)
            log.info(
                "state=%s from=%s event=%s generation=%d crashes=%d",
                *(after.state, before.state, type(event).__name__),
                *(after.generation, after.crashes),
            )
        self._records.trouble(before, after)
        self._records.sleep(before, after)

    @staticmethod
    def _not_begun(
        before: Snapshot, event: ev.Event, unsaved: LlamactlError, now: float
    ) -> Step | None:
        """Return the step that refuses what would end an engine; None: nobody asked for it."""
        if isinstance(event, ev.Planned):
            problem = Problem.of(preflight.apply_refused(unsaved))
            after, effects = reduce(before, replace(event, plan=problem), now)
            # Nor is the one before it begun, which would then be the newest that can be.
            return applies.give_up(before, problem) if is_restart(after) else (after, effects)
        if isinstance(event, ev.Command):
            refused = Problem.of(preflight.refused(unsaved))
            return before, (ev.Reject(event.operation, refused),)
        return None

    def _loads_for(
        self, before: Snapshot, event: ev.Event, after: Snapshot, effects: tuple[ev.Effect, ...]
    ) -> None:
        """Remember who asks for the load that begins now, or that is to follow a stop."""
        begins = any(isinstance(effect, ev.Spawn) for effect in effects)
        begun = isinstance(event, ev.Resume) and event.begun and after.cause is before.cause
        if after.waiting and (begins or is_restart(after)):
            self._records.spawned(self._by(after.waiting[0]))
        elif begins and (undone := apply.undone(before, effects)) is not None:
            self._records.spawned(undone.by)
        elif begins and not (is_restart(before) or before.deferred or begun):
            self._records.spawned(DAEMON)

    def _expired(self, event: ev.Event) -> ev.Reject | None:
        """Return the end of a command whose caller has given it up: it waited too long for us."""
        if not isinstance(event, ev.Command):
            return None
        late = asking.expired(self._expires.pop(event.operation, math.inf))
        return None if late is None else ev.Reject(event.operation, Problem.of(late))

    async def _save(self, snapshot: Snapshot, *, prove: bool = False) -> None:
        """Save what is not yet; `prove` that it could be, though there is nothing new."""
        changing = snapshot.state is EngineState.RECONFIGURING
        saved = durable.saved_of(
            snapshot,
            change_by=self._by(snapshot.waiting[0]) if changing else snapshot.change_by,
            load_by=self._records.by,
        )
        if saved == self._saved and not prove:
            self._unsaved = None
            return
        try:
            await asyncio.to_thread(store.save, self._paths.state_file, saved)
        except LlamactlError as exc:
            if self._unsaved is None or self._unsaved.message != exc.message:
                log.error("%s", exc.message)
            self._unsaved = exc
        else:
            self._saved, self._unsaved = saved, None

    async def _carry_out(self, effects: tuple[ev.Effect, ...], load_by: str) -> None:
        """Do it, write it down, then tell it: who is told finds it in the ledger.

        `load_by` asked for the load that was under way before this step.
        """
        for effect in effects:
            self._perform(effect)
        for effect in effects:
            if isinstance(effect, ev.Record):
                await self._records.record(effect, self._asked_by(), load_by)
        for effect in effects:
            if isinstance(effect, ev.Told):
                self._answer(effect)

    def _perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Spawn():
                self._start(self._effects.spawn(effect, self._unsaved))
            case ev.LookForFiles():
                self._start(self._effects.look_for_files(effect))
            case ev.Watch() | ev.CarryOut() | ev.CarryCut() | ev.CarryIn() | ev.CarryOff():
                self._start(self._effects.attend(effect))
            case ev.Signal():
                self._effects.signal(effect)
            case ev.SendReconfigure() | ev.PlanApply() | ev.Rebase() | ev.SendPage():
                self._ask(effect)
            case ev.ReadConfig() | ev.UseSettings():
                self._configure(effect)
            case ev.Exit():
                self._ending.set()

    def _ask(self, effect: ev.SendReconfigure | ev.PlanApply | ev.Rebase | ev.SendPage) -> None:
        match effect:
            case ev.SendReconfigure():
                self._start(self._effects.reconfigure(effect, self._by(effect.operation)))
            case ev.PlanApply():
                name = effect.command.operation
                self._operations.progress(name, "finding out what it comes to")
                self._start(self._effects.plan_apply(effect))
            case ev.Rebase():
                self._start(self._effects.rebase(effect))
            case ev.SendPage():
                waits = f"the engine takes {effect.command.subject} in its turn"
                self._operations.progress(effect.command.operation, waits)
                self._start(self._effects.page(effect))

    def _answer(self, effect: ev.Told) -> None:
        if isinstance(effect, ev.Tell):
            self._runs.tell(effect.run, effect.message)
            return
        name = effect.operation
        if isinstance(effect, ev.Reject):
            self._records.refused(self._operations.get(name).kind)
            self._operations.discard(name)
            if (future := self._accepted.pop(name, None)) is not None:
                future.set_exception(effect.problem.to_error())
            else:
                log.warning("what a signal asked for is declined: %s", effect.problem.message)
            return
        outcome = effect.result if isinstance(effect, ev.Finish) else effect.problem
        kind = self._operations.end(name, outcome, self._not_saved()).kind
        self._records.ended(kind, outcome)
        if kind is OperationKind.RELOAD:
            self._reload_ended(name, outcome)
        if kind is OperationKind.RUN and isinstance(outcome, Problem):
            self._runs.tell(name, RunMessage(event="refused", problem=outcome))
        why = f": {outcome.code}: {outcome.message}" if isinstance(outcome, Problem) else ""
        if why and self._by(name) == WATCHED:
            return  # which is tried again and again, and tells each reason once
        log.info("operation=%s kind=%s %s%s", name, kind, type(effect).__name__.lower(), why)

    def _not_saved(self) -> Problem | None:
        """Return why the present state is not on disk; None where it is."""
        return None if self._unsaved is None else Problem.of(self._unsaved)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Run an effect beside the loop. A bug in it ends the daemon; the engine lives on."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._queue.put_nowait(bug)

    def _asked_by(self) -> str:
        """Return who asked for the present transition."""
        return next((self._by(name) for name in self._snapshot.waiting), DAEMON)

    def _by(self, operation: str) -> str:
        return self._operations.get(operation).requested_by

    def _asked_to_end(self, name: str) -> None:
        operation = self._operations.create(OperationKind.DOWN, name)
        self._operations.nobody_asks(operation.id)
        # A person who interrupts once more waits no longer; a manager repeats its TERM at will.
        again = self._snapshot.closing and name == signal.SIGINT.name
        self._queue.put_nowait(ev.Down(operation.id, now=again))

    # --- reload: it begins and ends here, whoever asked for it and whatever comes of it ----------

    def _asked_to_reload(self, name: str) -> None:
        operation = self._operations.create(OperationKind.RELOAD, name)
        self._queue.put_nowait(ev.Reload(operation.id))

    def _configure(self, effect: ev.ReadConfig | ev.UseSettings) -> None:
        if isinstance(effect, ev.UseSettings):
            self._effects.use(effect.settings)
            return
        log.info("reload of %s by %s", self._loaded.file, self._by(effect.operation))
        self._announcer.reloading()
        self._start(self._following.read(effect.operation))

    def _reload_ended(self, name: str, outcome: OperationResult | Problem) -> None:
        self._following.ended(name, outcome)
        refused = outcome.message if isinstance(outcome, Problem) else None
        self._announcer.reloaded(self._snapshot, refused)

    # --- what the control API calls --------------------------------------------------------------

    async def submit(
        self, kind: OperationKind, by: str, command: Callable[[str], ev.Command]
    ) -> Operation:
        """Hand in a command; return its operation, or raise why it is not accepted."""
        if kind is OperationKind.RESTART:
            await self._startable_again()
        if self._ending.is_set():
            raise error(Code.SHUTTING_DOWN, "the daemon is shutting down")
        operation = self._operations.create(kind, by)
        self._expires[operation.id] = asking.expires_at.get()
        accepted = self._accepted[operation.id] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(command(operation.id))
        await asyncio.shield(accepted)
        return self._operations.get(operation.id)

    async def apply(self, by: str, asked: ApplyRequest, config: Config | None = None) -> Operation:
        """Bring the engine to what is asked for, or say what that comes to.

        `config`: it is asked for by this configuration. Raises `apply_refused` for what the
        engine's binary does not take: nothing has changed; and `operation_in_progress` where it is
        only to be said and something else is under way.
        """
        async with self._applying:
            request = applies.merged(applies.newest(self._snapshot), asked)
            command = replace(await self._command(request, by, asked), config=config)
            if not asked.dry_run:
                kind = OperationKind.APPLY
                return await self.submit(kind, by, lambda name: replace(command, operation=name))
        if not apply.at_rest(self._snapshot):
            raise error(
                Code.OPERATION_IN_PROGRESS,
                f"the engine is {self._snapshot.state}: what it comes to can be told after that",
                hint="wait for the operation that runs: `llamactl status`",
            )
        operation = self._operations.create(OperationKind.APPLY, by)
        self._start(self._plan_only(replace(command, operation=operation.id)))
        return operation

    async def _command(self, request: UpRequest, by: str, asked: ApplyRequest) -> ev.Apply:
        try:
            spec = await self._effects.asked(request)
        except LlamactlError as exc:
            raise preflight.apply_refused(exc) from exc
        return ev.Apply(
            "",
            request,
            spec,
            by,
            asked,
            live_only=asked.live_only,
            overcommit=asked.overcommit,
            accept_loss=asked.accept_loss,
        )

    async def _plan_only(self, command: ev.Apply) -> None:
        effect = applies.to_plan(self._snapshot, command)
        try:
            result = ApplyResult(applied=False, plan=await self._effects.plan(effect))
        except LlamactlError as exc:
            self._answer(ev.Fail(command.operation, Problem.of(exc)))
        else:
            self._answer(ev.Finish(command.operation, result))

    async def _startable_again(self) -> None:
        """Raise `restart_refused` where a restart would end an engine and bring no other.

        Here and not in the loop: it takes a while, and what it finds makes no state of the engine.
        """
        wanted = self._snapshot.desired
        if self._snapshot.state is not EngineState.READY or wanted is None:
            return
        try:
            await self._effects.check(wanted, self._snapshot.override)
        except LlamactlError as exc:
            self._records.refused(OperationKind.RESTART)
            raise preflight.refused(exc) from exc

    async def wait(self, operation: str, wait_s: float) -> Operation:
        """Return the operation at its end or after `wait_s` seconds."""
        return await self._operations.wait(operation, wait_s)

    def status(self) -> Status:
        """Return everything that is known."""
        process = self._snapshot.process
        return view.status(
            self._snapshot,
            self._clock.now(),
            self._paths,
            daemon=self._about,
            config=self._following.status,
            operation=self._operations.running(),
            strangers=self._effects.strangers(),
            weight_loads=self._records.totals.weight_loads,
            loads_avoided=self._records.totals.loads_avoided,
            crash_record=self._records.crash_record,
            unsaved=self._not_saved(),
            ledger_lost=self._records.ledger_lost,
            in_files=self._effects.carrier.in_files,
            lost=self._records.lost,
            log_dropped=(
                instances.dropped_bytes(self._paths, process.instance_id) if process else 0
            ),
        )

    def config(self) -> RunningConfig:
        """Return the configuration as it was read, and as it is in force."""
        return view.config(self._snapshot, self._loaded, self._about.pid)

    async def pages(self) -> Pages:
        """Return the engine's pages, and what is left in files; raises why it cannot be asked.

        Where there is no engine, and something is left, it is that alone.
        """
        left = await self._effects.carrier.left()
        if left and self._snapshot.process is None:
            return Pages(pages=(), left=left)
        found = await self._engine().pages()
        return found.model_copy(update={"left": left})

    async def slots(self) -> Slots:
        """Return the engine's slots; raises why it cannot be asked."""
        return await self._engine().slots()

    async def look(self) -> EngineLook:
        """Return what the engine holds; raises why it cannot be asked."""
        return await self._engine().look()

    def _engine(self) -> EngineClient:
        problem, process = not_serving(self._snapshot), self._snapshot.process
        if problem is not None:
            raise problem.to_error()
        assert process is not None
        return self._effects.client(process)

    async def ledger(self, since: datetime | None, limit: int) -> Ledger:
        """Return the newest lines of the ledger; raises `state_unreadable`."""
        found = await asyncio.to_thread(
            ledger.read, self._paths.ledger_file, since=since, limit=limit
        )
        return found.model_copy(update={"lost": self._records.ledger_lost})

    async def metrics(self) -> bytes:
        """Return the metrics text, the engine's part included if it answers."""
        return await self._scrape.text()

    def run_engine(self, asked: RunRequest, pid: int) -> AsyncIterator[bytes]:
        """Yield what a run is told, until its end or the caller's."""
        return self._runs.serve(asked, pid)

    def log_lines(
        self, count: int, *, follow: bool, since: datetime | None, run: str | None
    ) -> AsyncIterator[bytes]:
        """Yield the engine's log; a follower ends with the daemon, or with that run."""
        if run is not None:
            return self._runs.log(run, count, since)
        path, until = self._paths.engine_log, self._ending
        return logs.read(path, count, follow=follow, since=since, until=until)
