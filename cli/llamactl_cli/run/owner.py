"""One run of llama-server: the daemon is asked for the engine, and until its end it is ours.

One request (`POST /v1/run`) asks for the engine and holds it: as long as its answer lasts, this
process is the engine's owner, and whatever ends us ends that. What the answer says, line by line:

    accepted  we are the owner; the engine's log is followed from now on
    listen    an engine is being loaded; from its first answer on our port listens
    ready     it serves as it was asked to; our port listens
    notice    a line for stderr
    exit      it has ended, and so do we, in the same way
    refused   it was not done, and nothing has changed
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamactl_cli.run import context, daemon, places, words
from llamactl_cli.run.engine import Engine
from llamactl_cli.run.link import DeclinedError, Link, SilentError, UnreachableError, ask
from llamactl_cli.run.relay import Relay, bind
from llamactl_cli.run.screen import Screen

if TYPE_CHECKING:
    import socket
    from collections.abc import Coroutine

FAILED = 1
"""llama-server's own code for everything that goes wrong before it serves."""
OURS_FAILED = 125
"""What failed is llamactl and not what it runs: as env, timeout and docker have it."""
TAKEOVER_S = 5.0
"""How long the port of an owner that is just ending is waited for."""
POLL_S = 0.05
READY_S = 3.0
"""How long a daemon may take to see that an engine is healthy, when we have."""
RETRY_S = 0.5
"""Pause between two tries to reach a daemon that is gone."""
SPAWN_AFTER_S = 2.0
"""So long a daemon's manager has the first word; then we start one."""
ASK_S = 5.0
"""How long a daemon may take to say who has the engine."""
LEAVE_S = 0.5
"""How long who leaves waits to know that there is a daemon to count the time."""
LOG_LINES_MAX = 100_000
LOG_END_S = 5.0
"""How long the end of the engine's log is waited for when the engine has ended."""
FLUSH_S = 1.0
TERMS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class End:
    """How we end: with a code, by a signal, or as the plain program, for this reason."""

    code: int = 0
    signal: int = 0
    plain_program: str | None = None


class StopError(Exception):
    """We end here, with these words on stderr."""

    def __init__(self, text: str, code: int = OURS_FAILED) -> None:
        super().__init__(text)
        self.code = code


class Owner:
    """The run, as one loop over what happens to it. Raises what `words.address` raises."""

    def __init__(self, asked: words.Words) -> None:
        self.asked = asked
        self._host, self._port = words.address(asked.args, os.environ)
        self._places = places.Places(os.environ, asked.instance)
        self._program = os.environ.get("LLAMACTL_ENGINE_PATH", "")
        if not words.is_bare(asked.program):
            self._program = str(Path(asked.program).absolute())
        self._screen = Screen()
        self._log_since = _now()
        self._events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._relay: Relay | None = None
        self._link: Link | None = None
        self._log: asyncio.Task[None] | None = None
        self._reattaching: asyncio.Task[None] | None = None
        self._engine: Engine | None = None
        self._linger_s: float | None = None
        """Known once the engine serves."""
        self._agreed_s = asked.linger_s
        """What the daemon goes by; the next one is told the same."""
        self._is_signalled = False
        self._hurried: asyncio.Future[None]

    async def run(self) -> End:
        """Return how it ended."""
        loop = asyncio.get_running_loop()
        self._hurried = loop.create_future()
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # as nohup leaves it
        for number in TERMS if ignored else (*TERMS, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled, number)
        self._start(self._begin())
        self._start(self._watch_daemon())
        end = None
        try:
            while end is None:
                end = await self._unless_hurried(self._happened(*await self._events.get()))
        except StopError as exc:
            self._screen.say(str(exc))
            end = End(exc.code)
            if self._relay is not None:
                self._relay.close()
        self._screen.flush(FLUSH_S)
        return end

    def _signalled(self, number: int) -> None:
        """Take the first signal as an event among others; the second one ends all waiting."""
        if not self._is_signalled:
            self._is_signalled = True
            self._post("signal", number)
        elif not self._hurried.done():
            self._hurried.set_result(None)

    async def _unless_hurried(self, work: Coroutine[None, None, End | None]) -> End | None:
        task = asyncio.create_task(work)
        await asyncio.wait((task, self._hurried), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else End(FAILED)

    async def _happened(self, kind: str, what: Any) -> End | None:
        match kind:
            case "failed":
                raise what
            case "signal":
                return await self._leave(what)
            case "message":
                return await self._told(what)
            case "hung up" if what is self._link:
                self._link = None
                if self._engine is None:
                    raise StopError("the daemon has ended")
                if self._engine.is_gone:
                    return await self._ended_untold(self._engine)
                self._reattaching = self._start(self._reattach())
            case "gone" if self._link is None and self._engine is not None:
                return await self._ended_untold(self._engine)
        return None

    def _post(self, kind: str, what: Any = None) -> None:
        self._events.put_nowait((kind, what))

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            self._post("failed", problem)

    # --- begin -----------------------------------------------------------------------------------

    async def _begin(self) -> None:
        bound = await self._bind()
        if self._port == 0:
            self._port = bound.getsockname()[1]
            self._screen.say(f"--port 0: it is {self._port}")
        self._relay = Relay(bound)
        try:
            await self._attach()
        except UnreachableError:
            await self._spawn()
            await self._attach_or_stop()
        except DeclinedError as exc:
            raise StopError(_said(exc.problem), FAILED) from exc

    async def _attach_or_stop(self) -> None:
        try:
            await self._attach()
        except UnreachableError as exc:
            raise StopError(f"no daemon answers: {exc}") from exc
        except DeclinedError as exc:
            raise StopError(_said(exc.problem), FAILED) from exc

    async def _attach(self) -> Link:
        """Ask for the engine. Raises `UnreachableError`, `DeclinedError`."""
        body = {
            "argv": list(self.asked.args),
            "engine_path": self._program or None,
            "host": self._host,
            "port": self._port,
            "linger_s": self._agreed_s,
            "overcommit": self.asked.overcommit,
            "instance_id": None if self._engine is None else self._engine.instance_id,
            "context": context.take(os.environ),
        }
        self._link = await Link.open(self._places.control_socket, "POST", "/v1/run", body)
        self._start(self._hear(self._link))
        return self._link

    async def _hear(self, link: Link) -> None:
        async for line in link.lines():
            self._post("message", json.loads(line))
        link.close()
        self._post("hung up", link)

    async def _spawn(self) -> None:
        shared = self.asked.shared_cgroup
        try:
            await asyncio.to_thread(places.spawn_daemon, self._places, shared_cgroup=shared)
        except places.PlacesError as exc:
            raise StopError(str(exc)) from exc

    async def _watch_daemon(self) -> None:
        """Do not wait for ever, and without a word, for a daemon that is stopped or hangs."""
        try:
            await daemon.watch(self._places, lambda: self._engine is None, self._screen.say)
        except SilentError as exc:
            raise StopError(str(exc)) from exc

    async def _bind(self) -> socket.socket:
        """Bind and do not listen. A port that an owner before us is giving up is waited for."""
        deadline = time.monotonic() + TAKEOVER_S
        while True:
            try:
                return await asyncio.to_thread(bind, self._host, self._port)
            except OSError as exc:
                problem = f"{self._host}:{self._port} cannot be bound: {exc.strerror or exc}"
                if exc.errno != errno.EADDRINUSE:
                    raise StopError(problem, FAILED) from exc
            owner = await self._other_owner()
            if owner is None:
                raise StopError(problem, FAILED)
            if time.monotonic() > deadline:
                pid = owner["pid"]
                raise StopError(f"{problem}: the run with pid {pid} owns it and lives", FAILED)
            await asyncio.sleep(POLL_S)

    async def _other_owner(self) -> dict[str, Any] | None:
        """Return the run that has our port, if it is one."""
        try:
            told = await ask(self._places.control_socket, "/v1/status", ASK_S)
            owner = json.loads(told)["owner"]
        except (UnreachableError, DeclinedError, ValueError, KeyError, TypeError):
            return None
        return owner if owner is not None and owner["port"] == self._port else None

    # --- while it lasts --------------------------------------------------------------------------

    async def _told(self, message: dict[str, Any]) -> End | None:
        match message["event"]:
            case "accepted":
                self._log = self._start(self._follow_log(message["run"]))
            case "listen":
                self._start(self._listen_when_it_answers(self._meet(message)))
            case "ready":
                self._meet(message)
                self._linger_s = message["linger_s"]
                await self._listen()
            case "notice":
                self._screen.say(message["text"])
            case "refused":
                return await self._refused(message["problem"])
            case "exit":
                if message["text"]:
                    self._screen.say(message["text"])
                return await self._end_like(message["code"], message["signal"])
        return None

    async def _refused(self, problem: dict[str, Any]) -> End | None:
        if problem["code"] == "engine_unknown" and not self._program:
            self._link = None
            self._start(self._attach_built())
            return None
        if problem["code"] == "address_differs" and self._relay is not None:
            self._link = None
            self._relay.close()
            self._move(problem["details"])
            self._start(self._begin())
            return None
        if problem["code"] == "model_elsewhere":
            return End(plain_program=_said(problem))
        if problem["code"] == "engine_unpatched" and self.asked.passthrough:
            return End(plain_program=problem["message"])
        raise StopError(_said(problem), FAILED)

    def _move(self, where: dict[str, Any]) -> None:
        """Go where llama-server's own files have it listen."""
        try:
            self._host, self._port = words.place(str(where["host"]), str(where["port"]))
        except words.NoAddressError as exc:
            raise StopError(str(exc), FAILED) from exc
        except words.UsageError as exc:
            raise StopError(str(exc)) from exc

    async def _attach_built(self) -> None:
        try:
            self._program = await asyncio.to_thread(places.built_engine, self._screen.say)
        except places.PlacesError as exc:
            raise StopError(str(exc)) from exc
        await self._attach_or_stop()

    def _meet(self, message: dict[str, Any]) -> Engine:
        """Take note of the engine that the daemon names; it may be another than before."""
        assert self._relay is not None
        name, pid, path = message["instance_id"], message["pid"], message["socket"]
        self._agreed_s = message["linger_s"]
        self._relay.lead_to(path)
        if self._engine is None or self._engine.instance_id != name:
            if self._engine is not None:
                self._engine.forget()
            self._engine = Engine(name, pid, path, lambda: self._post("gone"))
        return self._engine

    async def _listen_when_it_answers(self, engine: Engine) -> None:
        await engine.answers()
        await self._listen()

    async def _listen(self) -> None:
        assert self._relay is not None
        where = f"[{self._host}]" if ":" in self._host else self._host
        try:
            is_new = await self._relay.start()
        except OSError as exc:
            problem = f"{where}:{self._port} cannot be listened on: {exc.strerror}"
            raise StopError(problem, FAILED) from exc
        if is_new:
            self._screen.say(f"listening on http://{where}:{self._port}")

    async def _follow_log(self, run: str) -> None:
        """Forward the log until this run ends, or the daemon does."""
        target = f"/v1/logs?follow=true&lines={LOG_LINES_MAX}&run={run}&since={self._log_since}"
        with contextlib.suppress(UnreachableError, DeclinedError):
            link = await Link.open(self._places.control_socket, "GET", target)
            async for line in link.lines():
                self._screen.log(line)
            link.close()
        self._log_since = _now()  # where the next daemon's part begins

    async def _reattach(self) -> None:
        """The daemon is gone and the engine lives: relay on, and be its owner for the next one."""
        self._screen.say("the daemon is gone; the engine and what it serves go on")
        began, spawned = time.monotonic(), False
        while True:
            try:
                await self._attach()
            except (UnreachableError, DeclinedError):
                await asyncio.sleep(RETRY_S)
            else:
                return
            if not spawned and time.monotonic() - began > SPAWN_AFTER_S:
                spawned = True
                with contextlib.suppress(StopError):
                    await self._spawn()

    # --- the end ---------------------------------------------------------------------------------

    async def _leave(self, number: int) -> End:
        """Go as llama-server would, the port first."""
        if self._relay is not None:
            self._relay.close()
        if self._linger_s is None:
            await self._see_it_loaded()
        if self._reattaching is not None:
            self._reattaching.cancel()
        if self._link is not None:
            self._link.close()
        stays = self._engine is not None and not self._engine.is_gone
        waits = stays and self._linger_s == 0 and number != signal.SIGHUP
        if stays:
            await self._leave_it_to_a_daemon(waits=waits)
        if number == signal.SIGHUP or self._linger_s is None:
            return End(signal=number)
        while waits and self._engine is not None and not self._engine.is_gone:
            await self._events.get()
        return End()

    async def _leave_it_to_a_daemon(self, *, waits: bool) -> None:
        """See to it that somebody counts the time that the engine is left, or ends it now.

        That our link is whole says nothing: the daemon may have died just before we were told to
        go. One that answers has not. A new one adopts the engine, and goes on without us.
        """
        try:
            answers = await daemon.answers(self._places, LEAVE_S)
        except SilentError:
            self._screen.say(f"{daemon.silence(self._places)}; it ends the engine when it goes on")
            return
        if answers and (self._link is not None or not waits):
            return
        if not waits:
            shared = self.asked.shared_cgroup
            refusal = places.spawn_daemon_apart(self._places, shared_cgroup=shared)
            next_one = refusal or "another one is started, which ends the engine in time"
            self._screen.say(f"the daemon is gone; {next_one}")
            return
        if not answers:
            self._screen.say("the daemon is gone; another one is started, which ends the engine")
            await self._spawn()
        with contextlib.suppress(UnreachableError, DeclinedError):
            link = await self._attach()
            await self._until_ready()
            link.close()

    async def _see_it_loaded(self) -> None:
        """Who has seen the engine healthy has been served: the daemon may learn it a moment later.

        To leave before that would be to leave in the middle of a load.
        """
        if self._link is None or self._engine is None or not await self._engine.is_healthy():
            return
        self._linger_s = self._agreed_s
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._until_ready(), READY_S)

    async def _until_ready(self) -> None:
        """Return when the daemon has told that the engine serves, or tells nothing any more."""
        while True:
            kind, what = await self._events.get()
            if kind == "message" and what["event"] in {"ready", "refused", "exit"}:
                return
            if kind == "gone" or (kind == "hung up" and what is self._link):
                return

    async def _end_like(self, code: int | None, number: int | None) -> End:
        if self._relay is not None:
            self._relay.close()
        if self._log is not None:
            await asyncio.wait({self._log}, timeout=LOG_END_S)
        if number is not None:
            return End(signal=number)
        return End(FAILED if code is None else code)

    async def _ended_untold(self, engine: Engine) -> End:
        """The engine has ended while there was no daemon: its holder has left how."""
        record = await engine.record()
        if record is None:
            self._screen.say("the engine has ended, and nobody knows how")
            return await self._end_like(None, None)
        return await self._end_like(record["exit_code"], record["signal"])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _said(problem: dict[str, Any]) -> str:
    hint = problem.get("hint")
    return str(problem.get("message")) + (f" ({hint})" if hint else "")
