"""The configuration file: what of it is in force, what a newer one brings, and why it does not."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from functools import partial
from typing import TYPE_CHECKING

from llamactl_supervisor import events as ev
from llamactl_supervisor import reload
from llamactl_supervisor.config import config_refused, find
from llamactl_supervisor.errors import Code, LlamactlError, error
from llamactl_supervisor.fields import written
from llamactl_supervisor.metrics import CONFIG_HASH_DIGITS
from llamactl_supervisor.models import (
    ApplyRequest,
    ConfigStatus,
    EngineConfig,
    EngineState,
    OperationKind,
    OperationState,
    Problem,
    ReloadResult,
)
from llamactl_supervisor.watch import Seen, Watch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from llamactl_supervisor.config import Config, Loaded
    from llamactl_supervisor.metrics import Metrics
    from llamactl_supervisor.models import Operation, OperationResult, Override, UpRequest
    from llamactl_supervisor.operations import Operations
    from llamactl_supervisor.snapshot import Snapshot
    from llamactl_supervisor.spec import EngineSpec

    Check = Callable[[UpRequest, Override | None], Awaitable[EngineSpec | None]]
    Submit = Callable[[OperationKind, str, Callable[[str], ev.Command]], Awaitable[Operation]]
    Apply = Callable[[str, ApplyRequest, Config | None], Awaitable[Operation]]

log = logging.getLogger("llamactl.following")

WATCHED = "configuration file"
"""Who asks for what a change of the file brings."""
NEVER_SEEN = ""
"""A digest that no file has."""
RETRY_MAX_S = 300.0
"""Longest pause between two tries to follow a file that stays as it is."""
PASSING = frozenset(
    {
        *(Code.INSUFFICIENT_MEMORY, Code.NO_SPACE, Code.OUT_OF_RESOURCES, Code.STATE_UNWRITABLE),
        *(Code.CARRY_FAILED, Code.CONTEXT_BUILD_FAILED, Code.PAGE_OUT_FAILED, Code.MEDIA_HELD),
        *(Code.PORT_IN_USE, Code.FILE_UNREADABLE, Code.NO_FILE, Code.NO_ACCESS),
        *(Code.CONFIG_INSECURE, Code.TIMED_OUT, Code.SUPERSEDED, Code.REQUEST_EXPIRED),
        *(Code.OPERATION_IN_PROGRESS, Code.RECONFIGURE_IN_PROGRESS, Code.FAN_OUT_IN_PROGRESS),
        *(Code.ENGINE_UNREACHABLE, Code.ENGINE_SOCKET_GONE, Code.ENGINE_STOPPED),
    }
)
"""What may be otherwise though the file is the same. An engine that has died of it is not tried."""
_WRAPPED = frozenset({Code.APPLY_REFUSED, Code.CONFIG_REFUSED})
"""Codes whose cause is in the details."""
WAIT_S = 60.0
"""How long one wait for an operation's end takes at most; there is another after it."""


class Following:
    """Reads the file again when it is asked to, or as often as it changes.

    `check` says whether an engine could be started, `post`, `submit` and `apply` lead to the
    daemon's loop.
    """

    def __init__(
        self,
        loaded: Loaded,
        snapshot: Callable[[], Snapshot],
        check: Check,
        post: Callable[[ev.Event], None],
        submit: Submit,
        apply: Apply,
        operations: Operations,
        metrics: Metrics,
    ) -> None:
        self._loaded, self._snapshot, self._check, self._post = loaded, snapshot, check, post
        self._submit, self._apply, self._operations = submit, apply, operations
        self._read: dict[str, Loaded] = {}
        self._followed: dict[str, Loaded] = {}
        self._told: set[tuple[str, str]] = set()
        self._taken = loaded
        self._problem: Problem | None = None
        metrics.config_hash.set_function(self._hash)
        metrics.config_ok.set_function(self._is_ok)

    @property
    def status(self) -> ConfigStatus:
        """What configuration is in force, and why a newer one is not."""
        file = None if self._taken.file is None else str(self._taken.file)
        digest = self._taken.digest if self._is_in_force() else None
        return ConfigStatus(file=file, digest=digest, problem=self._problem)

    def _is_in_force(self) -> bool:
        return reload.is_in_force(self._snapshot(), self._taken.config.engine)

    def _is_ok(self) -> bool:
        return self._problem is None and (self._taken.file is None or self._is_in_force())

    def _hash(self) -> int:
        return int((self.status.digest or "0")[:CONFIG_HASH_DIGITS], 16)

    async def read(self, operation: str) -> None:
        """Read what was read at the start, and post what came; a bad file is declined as such.

        So is one that makes the next start one that cannot be: it may be that after a crash. What
        was followed already is not read again: it would be what has not been applied.
        """
        try:
            loaded = self._followed.get(operation) or await self._again()
            await self._startable_with(loaded.config)
        except LlamactlError as exc:
            refused = config_refused(exc)
            self._post(ev.ConfigBroken(operation, Problem.of(refused)))
        else:
            self._read[operation] = loaded
            self._post(ev.ConfigRead(operation, loaded.config))

    async def _again(self) -> Loaded:
        """Return what the file says by now.

        Raises what `config.load` raises, and `config_invalid` for what was left of a file from
        under an engine that runs: nobody asks for an engine without a model.
        """
        loaded = await asyncio.to_thread(self._loaded.again)
        snapshot, engine = self._snapshot(), loaded.config.engine
        asked = reload.loses_model(snapshot, engine)
        says_nothing = not any(each.source.startswith("file ") for each in loaded.values.values())
        changes = asked or reload.engine_changes(snapshot, engine)
        if snapshot.state is EngineState.STOPPED or not changes or not (asked or says_nothing):
            return loaded
        what = "says nothing" if says_nothing else "names no [engine] model any more"
        raise error(
            Code.CONFIG_INVALID,
            f"file {loaded.file}: {what}, and an engine is up that it was written for",
            hint="write the whole file again, or `llamactl stop` first if that is meant",
            details={"file": str(loaded.file), "field": "engine.model"},
        )

    async def _startable_with(self, config: Config) -> None:
        wanted, override = reload.wanted(self._snapshot(), config)
        if wanted is not None and wanted != self._snapshot().desired:
            await self._check(wanted, override)

    def ended(self, operation: str, outcome: OperationResult | Problem) -> None:
        """Take in what a reload came to, whoever asked for it."""
        read = self._read.pop(operation, None)
        self._followed.pop(operation, None)
        if isinstance(outcome, Problem):
            self._problem = outcome
            if self._operations.get(operation).requested_by != WATCHED:
                log.error("not reloaded, the old configuration stays: %s", outcome.message)
            return
        if read is not None:
            self._taken, self._problem = read, None
        if isinstance(outcome, ReloadResult):
            _tell(outcome)

    async def watch(self) -> None:
        """Follow each change of the file, and try again what may come to pass without another.

        One that came while nobody looked is one as well: what the engine has is known of old.
        The pause before another try doubles; what only waits for its turn is tried at each look.
        """
        known = NEVER_SEEN if reload.is_left(self._snapshot()) else self._loaded.digest
        watch, pause_s, again_at = Watch(known), 0.0, math.inf
        while True:
            poll_s = self._snapshot().settings.watch_poll_s
            await asyncio.sleep(poll_s)
            file = await asyncio.to_thread(find, self._loaded.env, self._loaded.file)
            seen = await asyncio.to_thread(watch.look, file)
            if seen is Seen.UNSETTLED or (seen is Seen.SAME and time.monotonic() < again_at):
                continue
            if seen is Seen.CHANGED:
                pause_s = 0.0
                self._told.clear()
            problem = await self._follow(watch.digest)
            if problem is None or cause(problem) not in PASSING:
                again_at = math.inf
                continue
            waits = problem.code == Code.OPERATION_IN_PROGRESS
            pause_s = pause_s if waits else min(max(poll_s, 2 * pause_s), RETRY_MAX_S)
            again_at = time.monotonic() + (0.0 if waits else pause_s)

    async def _follow(self, digest: str | None) -> Problem | None:
        """Bring the file into force: the engine first, then the rest. Returned is why it is not.

        What is in force then is what was applied, though the file may have changed meanwhile: the
        next look finds that.
        """
        try:
            loaded = await self._again()
            if loaded.digest != digest:
                raise error(Code.OPERATION_IN_PROGRESS, "the file is being written")
            snapshot = self._snapshot()
            fields = reload.engine_changes(snapshot, loaded.config.engine)
            left = fields or reload.awaits_restart(snapshot)
            if left and snapshot.desired is not None:
                asked = ApplyRequest(engine=EngineConfig.parse(fields))
                await self._succeeded(await self._apply(WATCHED, asked, loaded.config))
            begun = await self._submit(OperationKind.RELOAD, WATCHED, partial(self._reload, loaded))
            await self._succeeded(begun)
        except LlamactlError as exc:
            broken = exc.code in {Code.CONFIG_INVALID, Code.CONFIG_INSECURE}
            problem = Problem.of(config_refused(exc) if broken else exc)
            if problem.code != Code.OPERATION_IN_PROGRESS:
                self._declined(problem)
            return problem
        self._told.clear()
        return None

    def _reload(self, loaded: Loaded, operation: str) -> ev.Reload:
        self._followed[operation] = loaded
        return ev.Reload(operation)

    def _declined(self, problem: Problem) -> None:
        """Say why the file is not in force; the log has each reason once, however often tried."""
        self._problem = problem
        reason = (problem.code, cause(problem))
        if reason in self._told:
            return
        self._told.add(reason)
        tried = "; tried again until it is" if cause(problem) in PASSING else ""
        log.error("the configuration is not followed: %s%s", problem.message, tried)

    async def _succeeded(self, operation: Operation) -> None:
        """Return at the operation's end; raise its error."""
        while operation.state is OperationState.RUNNING:
            operation = await self._operations.wait(operation.id, WAIT_S)
        if operation.error is not None:
            raise operation.error.to_error()


def cause(problem: Problem) -> str:
    """Return the code of what is at the bottom of it."""
    reason = problem.details.get("reason") if problem.code in _WRAPPED else None
    return problem.code if reason is None else str(reason)


def _tell(result: ReloadResult) -> None:
    for change in result.applied:
        before, after = written(change.before), written(change.after)
        log.info("reloaded %s=%s, was %s", change.field, after, before)
    for change in result.needs_restart:
        whole = "engine" if change.field.startswith("engine.") else "daemon"
        before, after = written(change.before), written(change.after)
        why = "%s is %s until the %s is restarted: configured as %s"
        log.warning(why, change.field, before, whole, after)
