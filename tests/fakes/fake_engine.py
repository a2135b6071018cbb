#!/usr/bin/env python3
"""A llama-server of the standard library that obeys our flags and misbehaves on request.

Misbehaviour is asked for with extra arguments, so that a test's request says what it is about:

    --fake-load-s S          answer 503 "Loading model" for S seconds, writing a dot now and then
    --fake-never-ready       answer 503 for ever, and write nothing
    --fake-load-exit RC      exit with RC before the first answer, after words on stderr
    --fake-ignore-term       do not end on TERM
    --fake-flood BYTES       write that many bytes to stdout before becoming ready
    --fake-garbage           answer /props with something that is no JSON
    --fake-instance ID       claim to be another instance
    --fake-refuse REASON...  refuse that many reconfigures, each with its reason
    --fake-asleep            say so in /props, and die of being asked for the slots
    --fake-mute              never answer /slots
    --fake-busy              slot 0 works until a reconfigure or a cut; a page verb on it waits
    --fake-parked            hold a parked request, whose page is neither taken, dropped nor spilled
    --fake-taken             a page that is spilled is taken meanwhile, and so not dropped
    --fake-reconfigure-s S   take S seconds over each reconfigure, as behind a long prompt
    --fake-reconfigure HOW   garbage | silent (apply, then hang up) | die (exit 9 in the middle)
                             | reply-then-die
    --fake-wedged            answer everything, say that a request is worked on, compute nothing
    --fake-spin              the same, and use the processor all the while
    --fake-lives-s S         exit with 7 after S seconds of service
    --fake-older             be of a build whose /props has no compute_progress, and that does not
                             say what it needs
    --fake-needs BYTES       say that it would need that much memory
    --fake-file-s S          take S seconds over each verb with files, until "file_s" says otherwise
    --fake-waits-at N        have the Nth verb with files wait, until "waits_at" says otherwise
    --fake-restless          be of a build that does not know /quiesce
    --fake-keep-alive        keep connections open for the next question, as llama-server does

A test says the rest while it runs: POST /fake {"n_ubatches": 7, "is_working": true, ...} sets what
/props says; "answers": false leaves every question for properties without an answer, "slow_s": S
has a reconfigure (no dry run) take S seconds; "n_asked" counts them. "n_processing" requests go on
until they are cut; "quiesce_s" is how long /quiesce, "file_s" how long a verb with files takes;
"full": true lets no file be written, "dies_at": N has it die in the Nth verb with files from its
start; "tokens" are what its slots hold, "stored" its pages.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

REFUSAL_STATUS = {"invalid_geometry": 400, "page_out_failed": 500, "context_build_failed": 503}
PAGE_STATUS = {"bad_name": 400, "bad_slot": 400, "empty_slot": 400, "unknown_page": 404}
PAGE_STATUS |= {"no_file": 400, "no_space": 507}
FILE_ACTIONS = ("spill", "save", "restore")
TOKEN_BYTES = 1024
HEAD_BYTES = 512
AUTO_N_CTX = 8192
AUTO_N_SEQ = 4
MODEL_BYTES = 1000


def options() -> argparse.ArgumentParser:
    """Know exactly the options that the supervisor passes, and our own."""
    parser = argparse.ArgumentParser(allow_abbrev=False, usage=argparse.SUPPRESS)
    for name in ("--host", "--instance-id", "--slot-save-path", "--api-key-file", "--api-key"):
        parser.add_argument(name)
    parser.add_argument("--model", "-m")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--parallel", "-np", type=int, default=AUTO_N_SEQ)
    parser.add_argument("--ctx-size", "-c", type=int, default=AUTO_N_CTX)
    parser.add_argument("--threads", "-t", type=int)
    for name in ("--admin-private", "--metrics", "--kv-unified", "--no-kv-unified", "--quiesced"):
        parser.add_argument(name, action="store_true")
    for name in ("--print-args-json", "--print-memory-json"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--fake-needs", type=int, default=MODEL_BYTES)
    parser.add_argument("--fake-load-s", type=float, default=0.0)
    parser.add_argument("--fake-lives-s", type=float, default=math.inf)
    parser.add_argument("--fake-reconfigure-s", type=float, default=0.0)
    parser.add_argument("--fake-file-s", type=float, default=0.0)
    parser.add_argument("--fake-waits-at", type=int, default=0)
    parser.add_argument("--fake-load-exit", type=int)
    parser.add_argument("--fake-flood", type=int, default=0)
    flags = "never-ready ignore-term garbage asleep mute busy parked taken wedged spin older "
    flags += "restless keep-alive"
    for name in map("--fake-{}".format, flags.split()):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--fake-refuse", nargs="+", default=[])
    for name in ("--fake-instance", "--fake-reconfigure"):
        parser.add_argument(name)
    return parser


def told(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Answer --print-args-json: the options and what is given of them."""
    kinds = {"--ctx-size": "live", "--parallel": "live", "--kv-unified": "live"}
    kinds |= {"--threads": "context", "--model": "model"}
    known = {action.option_strings[0]: action for action in parser._actions}
    unified = known.pop("--no-kv-unified").option_strings
    table = [
        {"name": name, "args": action.option_strings, "env": None}
        | {"class": kinds.get(name, "server")}
        | {"args_neg": unified if name == "--kv-unified" else []}
        | {"arity": 0 if action.nargs == 0 else 1}
        for name, action in known.items()
    ]
    given: list[dict[str, Any]] = []
    names = {word: name for name, action in known.items() for word in action.option_strings}
    for word in sys.argv[1:]:
        if word in names:
            given.append({"name": names[word], "values": [], "source": "argv"})
        elif word in unified:
            given.append({"name": "--kv-unified", "values": ["0"], "source": "argv"})
        else:
            given[-1]["values"].append(word)
        if word == "--kv-unified":
            given[-1]["values"].append("1")
    asked = "--print-args-json"
    return {"build": "fake", "options": table, "given": [e for e in given if e["name"] != asked]}


def said(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> dict[str, Any]:
    """Answer --print-args-json or --print-memory-json."""
    if flags.fake_restless and flags.quiesced:
        sys.exit("error: invalid argument: --quiesced")
    if flags.print_args_json:
        return told(parser)
    if flags.fake_older:
        sys.exit("error: invalid argument: --print-memory-json")
    host = {"name": "CPU", "is_host": True, "free": 1, "total": 1}
    host |= {"model": flags.fake_needs, "context": flags.ctx_size, "compute": 0}
    other = {"name": "GPU", "is_host": False, "free": 1, "total": 2}
    n_ctx = Engine._geometry(flags.ctx_size, flags.parallel, flags.kv_unified)["n_ctx"]
    return {
        "build": "fake",
        "n_ctx": n_ctx,
        "devices": [host, other | {"model": 1, "context": 1, "compute": 0}],
    }


class RefusedError(Exception):
    """A page verb that is declined: reason, message and further details."""

    def __init__(self, reason: str, message: str, **details: object) -> None:
        super().__init__(message)
        self.reason, self.message, self.details = reason, message, details


class Engine:
    """What a llama-server knows about itself."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.ready_at = time.monotonic() + flags.fake_load_s
        self.ends_at = self.ready_at + flags.fake_lives_s
        self.said: dict[str, Any] = {
            "n_weight_loads": 1,
            "is_sleeping": flags.fake_asleep,
            "n_ubatches": 1,
            "is_working": flags.fake_wedged or flags.fake_spin,
            "answers": True,
            "slow_s": 0.0,
            "n_asked": 0,
            "n_processing": 0,
            "quiesce_s": 0.0,
            "file_s": flags.fake_file_s,
            "full": False,
            "dies_at": 0,
            "waits_at": flags.fake_waits_at,
            "tokens": {},
            "stored": {},
        }
        self.is_quiet = flags.quiesced
        self.n_files = 0
        self.geometry = self._geometry(flags.ctx_size, flags.parallel, flags.kv_unified)
        self.last_reconfigure: dict[str, Any] | None = None
        self.asked = 0
        self.free = threading.Event()
        if not flags.fake_busy:
            self.free.set()
        # Where it does not begin quiet it spares the test a request.
        self.tokens = {} if flags.quiesced else {slot: 40 + slot for slot in range(flags.parallel)}
        self.stored = {"parked-1": 7} if flags.fake_parked else {}
        self.homes: dict[str, int] = {}

    @property
    def loading(self) -> bool:
        """Whether the model is still being loaded."""
        return bool(self.flags.fake_never_ready) or time.monotonic() < self.ready_at

    @staticmethod
    def _geometry(n_ctx: int, n_seq: int, unified: bool) -> dict[str, Any]:
        per_seq = -(-(n_ctx // n_seq) // 256) * 256
        return {
            "n_ctx": per_seq * n_seq,
            "n_seq": n_seq,
            "n_ctx_seq": per_seq,
            "n_ctx_slot": min(per_seq, 8192),
            "kv_unified": unified,
            "cache_type_k": "f16",
            "cache_type_v": "f16",
        }

    def props(self) -> dict[str, Any]:
        """Answer GET /props."""
        props = {
            "total_slots": self.geometry["n_seq"],
            "context_geometry": self.geometry,
            "n_weight_loads": self.said["n_weight_loads"],
            "is_sleeping": self.said["is_sleeping"],
            "instance_id": self.flags.fake_instance or self.flags.instance_id,
            "last_reconfigure": self.last_reconfigure,
        }
        if not self.flags.fake_restless:
            props["is_quiet"] = self.is_quiet
        if not self.flags.fake_older:
            progress = {name: self.said[name] for name in ("n_ubatches", "is_working")}
            props["compute_progress"] = progress
        return props

    def quiesce(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Answer POST /quiesce."""
        time.sleep(self.said["quiesce_s"])
        working = self.said["n_processing"] + (not self.free.is_set())
        n_cut = working if wanted.get("cut") else 0
        if n_cut:
            self.said["n_processing"] = 0
            self.free.set()
        self.is_quiet = wanted["is_quiet"]
        counts = {"n_processing": working - n_cut, "n_cut": n_cut}
        return {"is_quiet": self.is_quiet, "n_parked": 0, "n_waiting": 0} | counts

    def say(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Answer POST /fake."""
        self.said |= fields
        if "tokens" in fields:
            self.tokens = {int(slot): held for slot, held in fields["tokens"].items()}
        if "stored" in fields:
            self.stored = dict(fields["stored"])
        return self.said | {"tokens": self.tokens, "stored": self.stored, "is_quiet": self.is_quiet}

    def reconfigure(self, change: dict[str, Any]) -> dict[str, Any]:
        """Answer POST /reconfigure; an engine that sleeps is woken, by a dry run too."""
        if self.said["is_sleeping"]:
            self.said |= {"is_sleeping": False, "n_weight_loads": self.said["n_weight_loads"] + 1}
        before = self.geometry
        wanted = self._geometry(
            change.get("n_ctx", before["n_ctx"]),
            change.get("n_seq", before["n_seq"]),
            change.get("kv_unified", before["kv_unified"]),
        )
        outcome = "planned" if change.get("dry_run") else "applied"
        if outcome == "applied":
            outcome = "unchanged" if wanted == before else "applied"
            self.geometry = wanted
        receipt = {
            "outcome": outcome,
            "previous": before,
            "geometry": wanted,
            "pause_ms": 79.5,
            "phases_ms": {"page_out": 36.1, "page_in": 41.7, "swap": 1.7},
            "outside_pause_ms": {"build": 4.1},
            "tokens_held": 10106,
            "bytes_held": 230521516,
            "slots": [{"slot": 0, "tokens": 5053, "fate": "resident"}],
            "parked": [],
            "n_weight_loads": self.said["n_weight_loads"],
            "bytes_needed": {"CPU": wanted["n_ctx"] * TOKEN_BYTES},
            "something_newer": {"kept": True},
        }
        if outcome == "applied":
            self.last_reconfigure = receipt
            self.free.set()
        return receipt

    def slots(self) -> list[dict[str, Any]]:
        """Answer GET /slots: those that there are, then those that are parked."""
        if self.flags.fake_asleep:
            os._exit(8)
        if self.flags.fake_mute:
            threading.Event().wait()
        window, busy = self.geometry["n_ctx_seq"], not self.free.is_set()
        slots: list[dict[str, Any]] = [
            {"id": slot, "n_ctx": window, "is_processing": busy and slot == 0}
            | {"n_prompt_tokens": self.tokens.get(slot, 0)}
            for slot in range(self.geometry["n_seq"])
        ]
        parked = {"id": 1, "n_ctx": window, "is_processing": True, "n_prompt_tokens": 7}
        parked |= {"parked": True, "page": "parked-1", "reason": "n_seq", "tokens_fit": 0}
        return [*slots, parked] if self.flags.fake_parked else slots

    def metrics(self) -> bytes:
        """Answer GET /metrics: how often it was asked is all that it counts."""
        self.asked += 1
        name = "llamacpp:n_decode_total"
        return f"# TYPE {name} counter\n{name} {self.asked}\n".encode()

    def pages(self) -> list[dict[str, Any]]:
        """Answer GET /pages."""
        return [
            {"name": name, "n_tokens": held, "n_bytes": held * TOKEN_BYTES, "n_checkpoints": 2}
            | {"age_s": 83.4, "parked": self._parked(name), "running": self._parked(name)}
            | {"something_newer": True}
            | ({"parked": True, "slot": self.homes[name]} if name in self.homes else {})
            for name, held in self.stored.items()
        ]

    @staticmethod
    def _parked(name: str) -> bool:
        return name.startswith("parked-")

    def page(self, slot: int, action: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Answer POST /slots/{id}?action=...&page=..."""
        if action == "page_out" and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
            raise RefusedError("bad_name", f"{name!r} is no name of a page")
        if action == "page_drop":
            held = self._page(name)
        else:
            self._await_slot(slot)
            held = self._slot(slot) if action == "page_out" else self._page(name)
        receipt = self._receipt(slot, held) | {"page": name, "ms": 3.25}
        self.homes.pop(name, None)
        if action == "page_out":
            self.stored[name] = self.tokens.pop(slot)
            self.homes |= {name: body["home"]} if "home" in body else {}
            return receipt
        del self.stored[name]
        if action == "page_in":
            self.tokens[slot] = held
            receipt["n_reusable"] = held
        return receipt

    def files(self, slot: int, action: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Answer POST /slots/{id}?action=spill, save or restore.

        A page is a file with its tokens and model, and a sidecar that may be lost.
        """
        filename = body["filename"]
        if not re.fullmatch(r"[^./\x00-\x1f][^/\x00-\x1f]{0,199}", filename):
            raise RefusedError("bad_name", "Invalid filename")
        file = Path(self.flags.slot_save_path) / filename
        sidecar = file.with_name(f"{filename}.ckpt")
        self.n_files += 1
        if self.n_files == self.said["dies_at"]:
            os._exit(9)
        while self.n_files == self.said["waits_at"]:
            time.sleep(0.01)
        time.sleep(self.said["file_s"])
        if action != "spill":
            self._await_slot(slot)
        if self.said["full"] and action != "restore":
            raise RefusedError("no_space", "there is no space for it")
        if action == "restore":
            return self._restore(slot, file, sidecar)
        held = self._page(name) if action == "spill" else self._slot(slot)
        file.write_text(json.dumps({"n_tokens": held, "model": self.flags.model}))
        sidecar.touch()
        receipt = self._receipt(slot, held) | {"filename": filename}
        receipt["n_written"] = held * TOKEN_BYTES + HEAD_BYTES
        if action == "save":
            return receipt | {"n_saved": held, "timings": {"save_ms": 4.6, "engine_ms": 0.1}}
        dropped = body["drop"] and not self.flags.fake_taken
        if dropped:
            del self.stored[name]
        return receipt | {"page": name, "dropped": dropped, "ms": 4.6}

    def _restore(self, slot: int, file: Path, sidecar: Path) -> dict[str, Any]:
        if not file.exists():
            raise RefusedError("no_file", f"there is no page in files '{file.name}'")
        state = json.loads(file.read_text())
        if state["model"] != self.flags.model:
            differs = {"field": "model", "page": state["model"], "server": self.flags.model}
            said = f"model: made for '{differs['page']}', there is '{differs['server']}'"
            raise RefusedError("page_mismatch", f"the page fits another. {said}", fields=[differs])
        held = self.tokens[slot] = state["n_tokens"]
        lost = [] if sidecar.exists() else [{"file": sidecar.name, "why": "it is missing"}]
        receipt = self._receipt(slot, held) | {"filename": file.name, "lost": lost}
        receipt |= {"n_reusable": held, "n_restored": held}
        receipt["n_read"] = held * TOKEN_BYTES + HEAD_BYTES
        return receipt | {"timings": {"restore_ms": 5.2, "engine_ms": 0.1}}

    def _await_slot(self, slot: int) -> None:
        if slot >= self.geometry["n_seq"]:
            raise RefusedError("bad_slot", f"there is no slot {slot}")
        if slot == 0:
            self.free.wait()

    def _slot(self, slot: int) -> int:
        if not (held := self.tokens.get(slot, 0)):
            raise RefusedError("empty_slot", f"slot {slot} holds nothing")
        return held

    def _page(self, name: str) -> int:
        if name not in self.stored:
            raise RefusedError("unknown_page", f"there is no page '{name}'")
        if self._parked(name):
            raise RefusedError("request_waiting", f"'{name}' is a request that has not ended")
        return self.stored[name]

    @staticmethod
    def _receipt(slot: int, held: int) -> dict[str, Any]:
        sizes = {"n_tokens": held, "n_bytes": held * TOKEN_BYTES, "n_checkpoints": 2}
        return {"id_slot": slot} | sizes | {"something_newer": True}


class Handler(BaseHTTPRequestHandler):
    """One request."""

    engine: Engine

    def log_message(self, *_: object) -> None:
        """Be silent."""

    def address_string(self) -> str:
        """Have none: the peer of a unix socket has no address."""
        return "unix"

    def answer(self, status: int, body: object) -> None:
        """Send `body` as JSON, or as it is if it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(data)

    def do_GET(self) -> None:
        """Answer /health, /props, /pages, /slots and /metrics."""
        if self.engine.loading:
            self.answer(503, {"error": {"code": 503, "message": "Loading model"}})
        elif self.path == "/props":
            while not self.engine.said["answers"]:
                time.sleep(0.05)
            props = b"<html>" if self.engine.flags.fake_garbage else self.engine.props()
            self.answer(200, props)
        elif self.path == "/metrics":
            self.answer(200, self.engine.metrics())
        elif self.path in ("/pages", "/slots"):
            self.answer(200, getattr(self.engine, self.path[1:])())
        else:
            self.answer(200, {"status": "ok"})

    def do_POST(self) -> None:
        """Answer /reconfigure, /quiesce and the page verbs."""
        url = urlsplit(self.path)
        if url.path.startswith("/slots/"):
            self.do_page(url.path.removeprefix("/slots/"), url.query)
            return
        change = self.body()
        if url.path == "/fake":
            self.answer(200, self.engine.say(change))
            return
        if url.path == "/quiesce":
            known = not self.engine.flags.fake_restless
            self.answer(200 if known else 404, self.engine.quiesce(change) if known else {})
            return
        time.sleep(self.engine.flags.fake_reconfigure_s)
        reasons, how = self.engine.flags.fake_refuse, self.engine.flags.fake_reconfigure
        if reasons:
            reason = reasons.pop(0)
            status = REFUSAL_STATUS.get(reason, 409)
            error = {"code": status, "type": "reconfigure_refused", "reason": reason}
            error |= {"message": f"refused: {reason}", "details": {"bytes_needed": 2**40}}
            self.answer(status, {"error": error})
        elif how == "garbage":
            self.answer(200, b'{"outcome": 7')
        elif how == "die":
            os._exit(9)
        else:
            self.engine.said["n_asked"] += 1
            began, is_real = time.monotonic(), not change.get("dry_run")
            while is_real and time.monotonic() - began < self.engine.said["slow_s"]:
                time.sleep(0.01)  # a test may say meanwhile that it is enough
            receipt = self.engine.reconfigure(change)
            if how == "silent":
                self.close_connection = True
                return
            self.answer(200, receipt)
            if how == "reply-then-die":
                os._exit(9)

    def body(self) -> dict[str, Any]:
        """Return the request's JSON."""
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body: dict[str, Any] = json.loads(text or "{}")
        return body

    def do_page(self, slot: str, query: str) -> None:
        """Answer one page verb."""
        asked = parse_qs(query, keep_blank_values=True, strict_parsing=True)
        action, name = asked["action"][0], asked.get("page", [""])[0]
        try:
            if action == "erase":
                self.answer(200, {"n_erased": self.engine.tokens.pop(int(slot), 0)})
            elif action in FILE_ACTIONS:
                self.answer(200, self.engine.files(int(slot), action, name, self.body()))
            else:
                self.answer(200, self.engine.page(int(slot), action, name, self.body()))
        except RefusedError as exc:
            status = PAGE_STATUS.get(exc.reason, 409)
            error = {"code": status, "type": "page_refused", "reason": exc.reason}
            error |= {"message": exc.message, "details": {"slot": int(slot)} | exc.details}
            self.answer(status, {"error": error})


class Tcp(socketserver.ThreadingMixIn, HTTPServer):
    """The public port."""

    daemon_threads = True


class Unix(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """The private socket."""

    daemon_threads = True


def spin() -> None:
    """Use the processor for ever."""
    while True:
        pass


def main() -> None:
    """Serve until TERM."""
    parser = options()
    # llama-server takes --slot_save_path for --slot-save-path
    sys.argv = [word.replace("_", "-") if word[:2] == "--" else word for word in sys.argv]
    flags = parser.parse_args()
    if flags.print_args_json or flags.print_memory_json:
        print(json.dumps(said(parser, flags)))  # noqa: T201
        return
    print("fake engine on", flags.host, file=sys.stderr, flush=True)  # noqa: T201
    if flags.fake_load_exit is not None:
        print("error: this model cannot be loaded", file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(flags.fake_load_exit)
    term = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: None if flags.fake_ignore_term else term.set())
    chunk = b"flooding " * 7 + b"\n"
    for _ in range(flags.fake_flood // len(chunk)):
        os.write(1, chunk)
    Handler.engine = Engine(flags)
    Handler.protocol_version = "HTTP/1.1" if flags.fake_keep_alive else "HTTP/1.0"
    public, _, path = flags.host.rpartition(",")
    Path(path).unlink(missing_ok=True)
    servers: list[socketserver.BaseServer] = [Unix(path, Handler)]
    if public:
        servers.append(Tcp((public, flags.port), Handler))
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    if flags.fake_spin:
        threading.Thread(target=spin, daemon=True).start()
    while not term.wait(0.05):
        if time.monotonic() >= Handler.engine.ends_at:
            print("fatal: the fake engine dies", file=sys.stderr, flush=True)  # noqa: T201
            os._exit(7)
        if flags.fake_load_s and Handler.engine.loading:
            os.write(2, b".")
    print("fake engine ends", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
