"""The one loop: events in, snapshot forward, effects out. Nothing else changes anything."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import uuid4

from llamactl_supervisor import activation, ledger, locks, logs, preflight, reload, store, view
from llamactl_supervisor import events as ev
from llamactl_supervisor.announcer import Announcer
from llamactl_supervisor.commands import not_serving
from llamactl_supervisor.config import config_refused
from llamactl_supervisor.effects import Effects
from llamactl_supervisor.errors import Code, ExitCode, LlamactlError, error
from llamactl_supervisor.events import EngineFacts
from llamactl_supervisor.launch import instance_id
from llamactl_supervisor.listeners import Listeners
from llamactl_supervisor.models import (
    DaemonStatus,
    EngineState,
    OperationKind,
    Problem,
    ReloadResult,
)
from llamactl_supervisor.notify import Notifier
from llamactl_supervisor.operations import Operations
from llamactl_supervisor.records import Records
from llamactl_supervisor.scrape import Scrape
from llamactl_supervisor.snapshot import IDLE, Snapshot
from llamactl_supervisor.state import reduce

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from llamactl_supervisor.config import Loaded
    from llamactl_supervisor.engine import EngineClient
    from llamactl_supervisor.models import (
        EngineLook,
        Ledger,
        Operation,
        OperationResult,
        Pages,
        Slots,
        Status,
    )

log = logging.getLogger("llamactl.daemon")


class Daemon:
    """Supervises one engine for one runtime directory, until `down`, TERM, INT or USR2.

    TERM and INT stop the engine first, USR2 leaves it to the next daemon.
    """

    def __init__(self, loaded: Loaded, version: str) -> None:
        paths, settings = loaded.paths, loaded.config.daemon
        self._loaded, self._paths, self._version = loaded, paths, version
        self._queue: asyncio.Queue[ev.Event | BaseException] = asyncio.Queue()
        self._operations = Operations()
        self._accepted: dict[str, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = asyncio.Event()
        self._effects = Effects(paths, settings, self._queue.put_nowait)
        self._records = Records(paths)
        self._scrape = Scrape(self._records.metrics, lambda: self._snapshot, self._engine)
        self._snapshot = Snapshot(seed=uuid4(), settings=settings)
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
        with locks.held(self._paths), contextlib.closing(self._notifier):
            self._load()
            handed = activation.inherited(os.environ, self._paths.control_socket)
            listeners = Listeners(
                *(self, self._version, self._paths.control_socket, handed),
                *(self._loaded.config.api, self._loaded.config.daemon.close_s),
            )
            await self._take_over(resume=resume)
            await self._serve(listeners)
        failed = self._snapshot.state is EngineState.FAILED and not self._snapshot.closing
        return ExitCode.NOT_RUNNING if failed else ExitCode.OK

    def _load(self) -> None:
        self._saved, aside = store.load(self._paths.state_file)
        if aside is not None:
            log.error("state file made no sense; set aside as %s, starting afresh", aside)
        self._snapshot = Snapshot(
            seed=uuid4(),
            settings=self._loaded.config.daemon,
            intent=self._saved.intent,
            generation=self._saved.generation,
            desired=self._saved.desired,
            running=self._saved.running,
            override=self._saved.override,
            baseline=self._saved.baseline,
            facts=EngineFacts(last_reconfigure=self._saved.last_reconfigure),
            loads_recorded=self._saved.loads_recorded,
            last_good=self._saved.last_good,
            trial_ends=(
                time.monotonic() + self._loaded.config.daemon.override_trial_s
                if self._saved.on_trial
                else None
            ),
        )

    async def _take_over(self, *, resume: bool) -> None:
        config = self._loaded.config
        found = self._effects.find(self._saved)
        if found is not None:
            log.info("adopting engine pid=%d instance=%s", found.engine.pid, found.instance_id)
            await self._step(ev.Found(found, config))
            for change in reload.unapplied(self._snapshot):
                why = "%s is %r, configured as %r: a reload or a restart of the engine takes it"
                log.warning(why, change.field, change.before, change.after)
            return
        if resume and config.engine.model is not None:
            self._require_engine()
        await self._step(ev.Resume(config, load=resume))

    def _require_engine(self) -> None:
        if self._loaded.config.engine.engine_path is None and self._saved.desired is None:
            raise error(
                Code.CONFIG_INVALID,
                "engine.model is configured, engine.engine_path is not: no llama-server is known",
                hint="`llamactl build` prints the path of one",
            )

    async def _serve(self, listeners: Listeners) -> None:
        listeners.start()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_end, number.name)
        loop.add_signal_handler(signal.SIGUSR2, self._queue.put_nowait, ev.HandOver())
        loop.add_signal_handler(signal.SIGHUP, self._asked_to_reload, signal.SIGHUP.name)
        self._start(self._announcer.keep_alive())
        self._announcer.follow(self._snapshot)
        try:
            while not self._ending.is_set():
                await self._step(await self._next())
                self._announcer.follow(self._snapshot)
            await self._operations.told(self._snapshot.settings.close_s)
        finally:
            self._ending.set()
            listeners.vanish()
            for future in self._accepted.values():
                future.set_exception(error(Code.SHUTTING_DOWN, "the daemon is shutting down"))
            await listeners.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            log.info("ended")

    async def _next(self) -> ev.Event:
        """Return the next event; a deadline that passes is one, after those that came before it."""
        deadline = self._snapshot.deadline
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            event = await asyncio.wait_for(self._queue.get(), left_s)
        except TimeoutError:
            event = ev.Tick() if self._queue.empty() else self._queue.get_nowait()
        if isinstance(event, BaseException):
            raise event
        return event

    async def _step(self, event: ev.Event) -> None:
        """Reduce one event; save what must outlive us before anything is done or told about it."""
        before = self._snapshot
        after, effects = reduce(before, event, time.monotonic())
        await self._save(after)
        self._snapshot = after
        for effect in effects:
            self._perform(effect)
        if isinstance(event, ev.Command) and (future := self._accepted.pop(event.operation, None)):
            future.set_result(None)
        for name in after.waiting:
            self._operations.progress(name, f"the engine is {after.state}")
        if before.state is not after.state:
            self._records.state(before, after)
            log.info(
                "state=%s from=%s event=%s generation=%d crashes=%d",
                *(after.state, before.state, type(event).__name__),
                *(after.generation, after.crashes),
            )

    async def _save(self, snapshot: Snapshot) -> None:
        process, name = snapshot.process, None
        if snapshot.state not in IDLE:
            spawned = instance_id(snapshot.seed, snapshot.generation)
            name = spawned if process is None else process.instance_id
        saved = store.Saved(
            intent=snapshot.intent,
            generation=snapshot.generation,
            desired=snapshot.desired,
            running=snapshot.running,
            override=snapshot.override,
            baseline=snapshot.baseline,
            instance_id=name,
            process=process,
            loads_recorded=snapshot.loads_recorded,
            last_reconfigure=snapshot.facts.last_reconfigure,
            on_trial=snapshot.trial_ends is not None,
            last_good=snapshot.last_good,
        )
        if saved == self._saved:
            return
        try:
            await asyncio.to_thread(store.save, self._paths.state_file, saved)
        except LlamactlError as exc:
            log.error("%s", exc.message)
            self._unsaved = exc
        else:
            self._saved, self._unsaved = saved, None

    def _perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Finish() | ev.Fail() | ev.Reject():
                self._answer(effect)
            case ev.Spawn():
                by = [self._by(name) for name in self._snapshot.waiting[:1]] or ["daemon"]
                self._records.spawned(by[0])
                self._start(self._effects.spawn(effect, self._unsaved))
            case ev.Watch():
                self._start(self._effects.watch(effect))
            case ev.Signal():
                self._effects.signal(effect)
            case ev.SendReconfigure():
                self._start(self._effects.reconfigure(effect, self._by(effect.operation)))
            case ev.SendPage():
                waits = f"the engine takes {effect.command.subject} in its turn"
                self._operations.progress(effect.command.operation, waits)
                self._start(self._effects.page(effect))
            case ev.ReadConfig() | ev.UseSettings():
                self._configure(effect)
            case ev.RecordLoad() | ev.RecordAvoided() | ev.RecordCrash():
                self._start(self._records.record(effect))
            case ev.Exit():
                self._ending.set()

    def _answer(self, effect: ev.Finish | ev.Fail | ev.Reject) -> None:
        name = effect.operation
        if isinstance(effect, ev.Reject):
            self._operations.discard(name)
            if (future := self._accepted.pop(name, None)) is not None:
                future.set_exception(effect.problem.to_error())
            else:
                log.warning("what a signal asked for is declined: %s", effect.problem.message)
            return
        outcome = effect.result if isinstance(effect, ev.Finish) else effect.problem
        kind = self._operations.end(name, outcome).kind
        self._records.ended(kind, outcome)
        if kind is OperationKind.RELOAD:
            self._reload_ended(outcome)
        log.info("operation=%s kind=%s %s", name, kind, type(effect).__name__.lower())

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Run an effect beside the loop. A bug in it ends the daemon; the engine lives on."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._queue.put_nowait(bug)

    def _by(self, operation: str) -> str:
        return self._operations.get(operation).requested_by

    def _asked_to_end(self, name: str) -> None:
        operation = self._operations.create(OperationKind.DOWN, name)
        self._operations.nobody_asks(operation.id)
        self._queue.put_nowait(ev.Down(operation.id))

    # --- reload: it begins and ends here, whoever asked for it and whatever comes of it ----------

    def _asked_to_reload(self, name: str) -> None:
        operation = self._operations.create(OperationKind.RELOAD, name)
        self._queue.put_nowait(ev.Reload(operation.id))

    def _configure(self, effect: ev.ReadConfig | ev.UseSettings) -> None:
        if isinstance(effect, ev.UseSettings):
            self._effects.use(effect.settings)
            return
        self._reload_begins(effect)
        self._start(self._read_config(effect))

    def _reload_begins(self, effect: ev.ReadConfig) -> None:
        log.info("reload of %s by %s", self._loaded.file, self._by(effect.operation))
        self._announcer.reloading()

    def _reload_ended(self, outcome: OperationResult | Problem) -> None:
        refused = outcome.message if isinstance(outcome, Problem) else None
        self._announcer.reloaded(self._snapshot, refused)
        if isinstance(outcome, Problem):
            log.error("not reloaded, the old configuration stays: %s", outcome.message)
        elif isinstance(outcome, ReloadResult):
            for change in outcome.applied:
                log.info("reloaded %s=%r, was %r", change.field, change.after, change.before)
            for change in outcome.needs_restart:
                whole = "engine" if change.field.startswith("engine.") else "daemon"
                why = "%s is %r until the %s is restarted: configured as %r"
                log.warning(why, change.field, change.before, whole, change.after)

    async def _read_config(self, effect: ev.ReadConfig) -> None:
        """Read what was read at the start, and post what came; a bad file is declined as such."""
        try:
            loaded = await asyncio.to_thread(self._loaded.again)
        except LlamactlError as exc:
            refused = config_refused(exc)
            self._queue.put_nowait(ev.ConfigBroken(effect.operation, Problem.of(refused)))
        else:
            self._queue.put_nowait(ev.ConfigRead(effect.operation, loaded.config))

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
        accepted = self._accepted[operation.id] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(command(operation.id))
        await asyncio.shield(accepted)
        return self._operations.get(operation.id)

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
            raise preflight.refused(exc) from exc

    async def wait(self, operation: str, wait_s: float) -> Operation:
        """Return the operation at its end or after `wait_s` seconds."""
        return await self._operations.wait(operation, wait_s)

    def status(self) -> Status:
        """Return everything that is known."""
        return view.status(
            self._snapshot,
            time.monotonic(),
            self._paths,
            daemon=self._about,
            operation=self._operations.running(),
            strangers=self._effects.strangers(),
            weight_loads=self._records.totals.weight_loads,
            loads_avoided=self._records.totals.loads_avoided,
            crash_record=self._records.crash_record,
        )

    async def pages(self) -> Pages:
        """Return the engine's pages; raises why it cannot be asked."""
        return await self._engine().pages()

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
        return await asyncio.to_thread(
            ledger.read, self._paths.ledger_file, since=since, limit=limit
        )

    async def metrics(self) -> bytes:
        """Return the metrics text, the engine's part included if it answers."""
        return await self._scrape.text()

    def log_lines(
        self, count: int, *, follow: bool, since: datetime | None
    ) -> AsyncIterator[bytes]:
        """Yield the engine's log; a follower ends with the daemon."""
        path, until = self._paths.engine_log, self._ending
        return logs.read(path, count, follow=follow, since=since, until=until)
