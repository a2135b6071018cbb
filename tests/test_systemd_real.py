"""The units under a systemd of their own: start, reload, restart, crash, watchdog, stop.

What is asserted is what an operator sees: exit codes of systemctl, the unit's state and status
text, the engine's pid, and what is left.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from booted_root import PYTHON, PYTHON_PATH, TREE, BootedRoot, booted
from sandbox import free_port, until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

SERVICE, SOCKET = "llamactl.service", "llamactl.socket"
RECIPE = "llama-server.service"
FAKE = "/opt/llamactl/tests/fakes/fake_engine.py"
USER = 1000
"""A user with a systemd of his own; he is not logged in."""


@pytest.fixture(scope="module")
def machine(engine_path: Path, model_path: Path) -> Iterator[BootedRoot]:
    mounts = {"/opt/engine": engine_path.parent, "/opt/model.gguf": model_path}
    with booted(mounts) as machine:
        yield machine


class Service:
    """llamactl as a service of the booted machine, with one engine configured."""

    scope = "--system"
    units = "/etc/systemd/system"
    config = "/etc/llamactl/config.toml"
    runtime = "/run/llamactl"
    state = "/var/lib/llamactl"

    def __init__(self, machine: BootedRoot) -> None:
        self.machine = machine
        self.port = free_port()

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command as whoever the service belongs to."""
        return self.machine.run(*command, check=check)

    def llamactl(self, *words: str, check: bool = True) -> Any:
        """Run the command as its owner does; return its JSON."""
        command = ("env", f"LLAMACTL_RUNTIME_DIR={self.runtime}", PYTHON, "-m", "llamactl_cli")
        done = self.run(*command, "--json", *words, check=check)
        return json.loads(done.stdout or done.stderr)

    def systemctl(self, *words: str) -> int:
        """Run it; return its exit code."""
        return self.run("systemctl", self.scope, *words, check=False).returncode

    def install(self, *words: str, settings: str = "") -> list[str]:
        """Install the units; return what is to be done next.

        `settings` are the test's own of the service.
        """
        done = self.llamactl("systemd", "install", self.scope, *words)
        own = f"[Service]\nEnvironment=PYTHONPATH={PYTHON_PATH}\n{settings}\n"
        self.machine.write(f"{self.units}/{SERVICE}.d/90-test.conf", own)
        assert self.systemctl("daemon-reload") == 0
        steps: list[str] = done["next"]
        return steps

    def configure(self, *fake: str, n_ctx: int = 4096, n_seq: int = 2, daemon: str = "") -> None:
        """Configure the engine: the real one, or the fake one if it is to misbehave."""
        engine = FAKE if fake else "/opt/engine/llama-server"
        lines = ["[engine]", 'model = "/opt/model.gguf"', f'engine_path = "{engine}"']
        lines += [f"port = {self.port}", f"n_ctx = {n_ctx}", f"n_seq = {n_seq}"]
        lines += [f"extra_args = {json.dumps(fake)}", "[daemon]", daemon]
        self.machine.write(self.config, "\n".join(lines))

    def start(self) -> int:
        """Start socket and service; return the engine's pid once systemctl says that it serves."""
        assert self.systemctl("start", SOCKET, SERVICE) == 0, self.journal()
        status = self.status()
        assert status["state"] == "ready"
        return int(status["engine"]["pid"])

    def status(self) -> Any:
        """Return what `llamactl status` says."""
        return self.llamactl("status", check=False)

    def shown(self, name: str) -> str:
        """Return a property of the service."""
        done = self.run("systemctl", self.scope, "show", SERVICE, f"--property={name}", "--value")
        return done.stdout.strip()

    def processes(self) -> str:
        """Return the pid and command of every process of ours, however it got away."""
        script = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline 2>/dev/null | "
        script += 'sed -n "s|.*\\(llamactl_supervisor\\|llama-server\\|fake_engine\\).*|'
        script += '${p#/proc/} &|p"; done'
        return self.machine.run("sh", "-c", script).stdout

    def runs(self, pid: int) -> bool:
        """Return whether the process is there."""
        return self.machine.run("test", "-d", f"/proc/{pid}", check=False).returncode == 0

    def kill(self, signal: str, pid: str | int) -> None:
        """Signal a process."""
        self.machine.run("sh", "-c", 'kill -"$1" "$2"', "sh", signal, str(pid))

    def crash(self) -> None:
        """Kill the daemon."""
        self.kill("KILL", self.shown("MainPID"))

    def saved(self) -> Any:
        """Return the state that outlives the daemon."""
        return json.loads(self.machine.run("cat", f"{self.state}/state.json").stdout)

    @contextlib.contextmanager
    def disk_that_hangs(self) -> Iterator[None]:
        """Have the daemon wait for ever when it saves its state: nobody reads that pipe."""
        new = f"{self.state}/state.json.new"
        self.run("mkfifo", new)
        yield
        self.run("rm", new)

    def journal(self) -> str:
        """Return what service and systemd wrote."""
        return self.machine.run("journalctl", "--no-pager", "-o", "cat", "-u", SERVICE).stdout

    def until_ready(self, old_daemon: str) -> Any:
        """Wait until another daemon serves; return its status."""

        def ready() -> Any:
            if self.shown("MainPID") in {"0", old_daemon} or self.shown("SubState") != "running":
                return None
            status = self.status()
            return status if status.get("state") == "ready" else None

        return until(ready, within_s=60)

    def close(self) -> None:
        """End everything and take the units away."""
        self.systemctl("kill", "--kill-whom=all", "--signal=KILL", SERVICE)
        self.systemctl("stop", SERVICE, SOCKET)
        self.systemctl("reset-failed", SERVICE)
        self.systemctl("disable", SERVICE, SOCKET)
        left = (self.config, self.runtime, self.state)
        self.machine.run("rm", "-rf", f"{self.units}/{SERVICE}.d", *left)
        self.llamactl("systemd", "uninstall", self.scope, "--force")
        self.systemctl("daemon-reload")


class UsersService(Service):
    """The same for one user, under his own systemd."""

    scope = "--user"
    home = "/home/somebody"
    units = f"{home}/.config/systemd/user"
    config = f"{home}/.config/llamactl/config.toml"
    runtime = f"/run/user/{USER}/llamactl"
    state = f"{home}/.local/state/llamactl"

    def __init__(self, machine: BootedRoot) -> None:
        super().__init__(machine)
        session = f"/run/user/{USER}"
        machine.run("useradd", "--uid", str(USER), "--create-home", "somebody")
        machine.run("install", "-d", "-m", "700", "-o", str(USER), session)
        manager = ("--unit=somebody", "--property=Delegate=yes", "--property=User=somebody")
        env = f"--setenv=XDG_RUNTIME_DIR={session}"
        machine.run("systemd-run", *manager, env, "/usr/lib/systemd/systemd", "--user")
        until(lambda: self.systemctl("is-active", "default.target") == 0)

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        ids = (f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
        env = (f"HOME={self.home}", f"XDG_RUNTIME_DIR=/run/user/{USER}")
        return self.machine.run("setpriv", *ids, "env", *env, *command, check=check)


@pytest.fixture
def service(machine: BootedRoot) -> Iterator[Service]:
    with contextlib.closing(Service(machine)) as service:
        yield service


def test_this_systemd_finds_nothing_wrong_with_the_units(service: Service) -> None:
    service.install("--gpu")
    checked = service.machine.run("systemd-analyze", "verify", SERVICE, SOCKET)
    assert (checked.stdout, checked.stderr) == ("", "")
    assert service.shown("Type") == "notify-reload"


def test_what_install_says_is_to_be_done_next_is_all_there_is_to_do(service: Service) -> None:
    steps = service.install("--cpu")
    service.configure()
    for step in steps[:2]:
        service.run(*shlex.split(step))
    assert service.status()["state"] == "ready"
    assert [service.systemctl("is-enabled", unit) for unit in (SERVICE, SOCKET)] == [0, 0]
    refused = service.llamactl("systemd", "uninstall", service.scope, check=False)["error"]
    assert refused["message"] == f"{SERVICE} is active"
    service.run(*shlex.split(refused["hint"].removeprefix("first: ")))
    gone = service.llamactl("systemd", "uninstall", service.scope)
    assert set(gone["files"].values()) == {"removed"}
    assert service.processes() == ""


def test_a_users_own_service_does_the_same(machine: BootedRoot) -> None:
    with contextlib.closing(UsersService(machine)) as service:
        steps = service.install("--cpu")
        assert steps[2].startswith("loginctl enable-linger")
        service.configure()
        machine.run("chown", "-R", str(USER), service.home)
        for step in steps[:2]:
            service.run(*shlex.split(step))
        pid = service.status()["engine"]["pid"]
        service.configure(n_ctx=16384)
        assert service.systemctl("reload", SERVICE) == 0
        for restart in (lambda: service.systemctl("restart", SERVICE), service.crash):
            daemon = service.shown("MainPID")
            restart()
            engine = service.until_ready(daemon)["engine"]
            assert (engine["pid"], engine["geometry"]["n_ctx"]) == (pid, 16384)
        with service.disk_that_hangs():
            service.systemctl("stop", "--no-block", SERVICE)
            until(lambda: service.shown("ActiveState") == "deactivating")
        service.crash()
        service.systemctl("stop", SERVICE)
        assert service.shown("Result") == "signal"
        assert service.processes() == ""


def test_start_is_over_when_the_engine_serves_and_stop_leaves_nothing(service: Service) -> None:
    service.install("--cpu")
    service.configure()
    pid = service.start()
    text = f"ready: 4096 tokens over 2 slots, engine pid {pid}"
    assert service.shown("StatusText") == text
    assert service.systemctl("stop", SERVICE) == 0
    assert (service.shown("Result"), service.shown("StatusText")) == ("success", "stopped")
    assert service.processes() == ""
    assert service.machine.run("ls", service.runtime).stdout.split() == [
        "control.sock",
        "daemon.lock",
    ]
    assert service.saved()["intent"] == "down"


def test_up_from_another_service_puts_the_daemon_behind_our_socket(service: Service) -> None:
    """The end of that service, or of a login session, is then not the daemon's."""
    service.install("--cpu")
    service.configure()
    directories = (f"RUNTIME_DIR={service.runtime}", f"STATE_DIR={service.state}")
    env = [f"--setenv=LLAMACTL_{directory}" for directory in directories]
    env += [f"--setenv=PYTHONPATH={PYTHON_PATH}", "--setenv=HOME=/root"]
    up = (PYTHON, "-m", "llamactl_cli", "up")
    service.run("systemd-run", "--quiet", "--wait", "--unit=caller", *env, *up)
    assert service.systemctl("is-active", "caller.service") != 0
    daemon = service.shown("MainPID")
    status = service.status()
    assert (status["state"], str(status["daemon"]["pid"])) == ("ready", daemon)
    cgroup = service.run("cat", f"/proc/{daemon}/cgroup").stdout
    assert cgroup.endswith(f"/{SERVICE}\n")


def test_a_socket_that_is_removed_is_missed_and_comes_back_with_a_restart(
    service: Service,
) -> None:
    service.install("--cpu")
    service.configure()
    pid = service.start()
    daemon = service.shown("MainPID")
    service.run("rm", f"{service.runtime}/control.sock")
    gone = f"the control socket {service.runtime}/control.sock is gone: systemd"
    until(lambda: service.shown("StatusText").startswith(gone))
    assert "systemctl restart llamactl.socket llamactl.service" in service.journal()
    assert service.systemctl("restart", SOCKET, SERVICE) == 0
    assert service.until_ready(daemon)["engine"]["pid"] == pid
    assert not service.shown("StatusText").startswith(gone)


def test_after_a_stop_the_socket_brings_the_daemon_back(service: Service) -> None:
    service.install("--cpu")
    assert service.systemctl("start", SOCKET) == 0
    for _ in range(2):
        assert service.shown("MainPID") == "0"
        assert service.status()["state"] == "stopped"
        until(lambda: service.shown("SubState") == "running")
        assert service.systemctl("stop", SERVICE) == 0


@pytest.mark.parametrize("kind", ["notify-reload", "notify"])
def test_reload_changes_the_live_engine(service: Service, kind: str) -> None:
    """The second kind is what an older systemd knows: it sends no signal besides."""
    service.install("--cpu", settings=f"Type={kind}")
    service.configure()
    pid = service.start()
    daemon = service.shown("MainPID")
    service.configure(n_ctx=16384, n_seq=4)
    assert service.systemctl("reload", SERVICE) == 0
    status = service.status()
    assert (status["engine"]["pid"], status["weight_loads"]) == (pid, 1)
    geometry = status["engine"]["geometry"]
    assert (geometry["n_ctx"], geometry["n_seq"]) == (16384, 4)
    assert service.shown("MainPID") == daemon
    assert service.shown("StatusText") == f"ready: 16384 tokens over 4 slots, engine pid {pid}"
    assert (service.shown("ActiveState"), service.shown("SubState")) == ("active", "running")
    assert service.systemctl("reload", SERVICE) == 0, "and a reload of nothing is one"


def test_a_reload_behind_a_long_prompt_is_waited_for(service: Service) -> None:
    """Longer than systemd is told to wait for a start, which is its limit for a reload too."""
    service.install("--cpu", settings="TimeoutStartSec=2")
    service.configure("--fake-reconfigure-s", "6")
    service.start()
    service.configure("--fake-reconfigure-s", "6", n_ctx=16384)
    assert service.systemctl("reload", SERVICE) == 0
    assert service.status()["engine"]["geometry"]["n_ctx"] == 16384


@pytest.mark.parametrize("broken", ["file", "engine"])
def test_a_reload_that_is_refused_fails_and_the_service_goes_on(
    service: Service, broken: str
) -> None:
    refuse = ("--fake-refuse", *["insufficient_memory"] * 2)
    service.install("--cpu")
    service.configure(*refuse)
    pid = service.start()
    if broken == "file":
        service.machine.write(service.config, "[engine\n")
    else:
        service.configure(*refuse, n_ctx=131072)
    assert service.systemctl("reload", SERVICE) == 1
    assert (service.shown("ActiveState"), service.shown("SubState")) == ("active", "running")
    assert "; reload refused: " in service.shown("StatusText")
    status = service.status() if broken == "engine" else None
    assert service.runs(pid)
    assert status is None or status["engine"]["geometry"]["n_ctx"] == 4096


def test_restart_hands_the_engine_over(service: Service) -> None:
    service.install("--cpu")
    service.configure()
    pid = service.start()
    daemon = service.shown("MainPID")
    assert service.systemctl("restart", SERVICE) == 0
    status = service.until_ready(daemon)
    assert (status["engine"]["pid"], status["engine"]["adopted"]) == (pid, True)
    assert status["weight_loads"] == 1
    assert service.systemctl("stop", SERVICE) == 0
    assert service.processes() == "", "an engine that was handed over is stopped like any"


@pytest.mark.parametrize("how", ["KILL", "STOP"])
def test_a_daemon_that_crashes_or_hangs_is_replaced_and_the_engine_goes_on(
    service: Service, how: str
) -> None:
    """A stopped daemon turns no loop: the watchdog ends it."""
    service.install("--cpu", settings="WatchdogSec=3")
    service.configure()
    pid = service.start()
    daemon = service.shown("MainPID")
    service.kill(how, daemon)
    status = service.until_ready(daemon)
    assert (status["engine"]["pid"], status["engine"]["adopted"]) == (pid, True)
    assert status["weight_loads"] == 1
    assert service.shown("NRestarts") == "1"
    if how == "STOP":
        assert "Watchdog timeout" in service.journal()


def test_an_engine_that_crashes_is_loaded_again_by_the_daemon(service: Service) -> None:
    service.install("--cpu")
    service.configure()
    pid = service.start()
    daemon = service.shown("MainPID")
    service.kill("KILL", pid)
    again = until(lambda: (now := service.status())["state"] == "ready" and now)
    assert again["engine"]["pid"] != pid
    assert again["weight_loads"] == 2
    assert (service.shown("MainPID"), service.shown("NRestarts")) == (daemon, "0")


def test_a_long_load_and_a_long_stop_are_waited_for(service: Service) -> None:
    """Both take longer than systemd is told to wait; the daemon asks for more while they go on."""
    service.install("--cpu", settings="TimeoutStartSec=2\nTimeoutStopSec=2")
    service.configure("--fake-load-s", "6", "--fake-ignore-term", daemon="stop_term_s = 6")
    service.start()
    assert service.systemctl("stop", SERVICE) == 0
    assert service.shown("Result") == "success"
    assert service.processes() == ""


@pytest.mark.parametrize("recorded", [True, False])
def test_a_stop_that_times_out_leaves_no_orphan(service: Service, recorded: bool) -> None:
    """The daemon hangs in the middle of the stop, or before it could record it."""
    service.install("--cpu", settings="TimeoutStopSec=3")
    service.configure("--fake-ignore-term", daemon="stop_term_s = 1.5")
    pid = service.start()
    if recorded:
        assert service.systemctl("stop", "--no-block", SERVICE) == 0
        until(lambda: service.saved()["intent"] == "down")
        service.kill("STOP", service.shown("MainPID"))
    else:
        with service.disk_that_hangs():
            assert service.systemctl("stop", "--no-block", SERVICE) == 0
            until(lambda: service.shown("ActiveState") == "deactivating")
            assert service.saved()["intent"] == "up"
    service.systemctl("stop", SERVICE)
    assert service.shown("Result") == "timeout"
    assert f"engine pid={pid} does not end: KILL" in service.journal()
    assert service.processes() == ""
    assert service.saved()["intent"] == "down"


def test_a_restart_of_a_daemon_that_hangs_keeps_the_engine(service: Service) -> None:
    service.install("--cpu", settings="TimeoutStopSec=3")
    service.configure("--fake-ignore-term")
    pid = service.start()
    daemon = service.shown("MainPID")
    with service.disk_that_hangs():
        service.llamactl("reconfigure", "--n-ctx", "8192", "--timeout", "2", check=False)
    assert service.systemctl("restart", SERVICE) == 0
    status = service.until_ready(daemon)
    asked = "a change is not begun before the disk has who asks for it"
    assert (status["engine"]["pid"], status["engine"]["geometry"]["n_ctx"]) == (pid, 4096), asked
    assert "State 'stop-sigterm' timed out. Killing." in service.journal()


def test_an_engine_that_was_given_up_leaves_the_service_up_to_say_so(service: Service) -> None:
    service.install("--cpu")
    service.configure("--fake-load-exit", "3", daemon="crashes_max = 0")
    assert service.systemctl("start", SERVICE) == 0
    assert service.shown("StatusText").startswith("failed: the engine exited with status 3")
    assert service.status()["state"] == "failed"


def test_on_failed_exit_fails_the_service_without_another_try(service: Service) -> None:
    service.install("--cpu")
    service.configure("--fake-load-exit", "3", daemon='crashes_max = 0\non_failed = "exit"')
    assert service.systemctl("start", SERVICE) == 1
    assert (service.shown("ActiveState"), service.shown("NRestarts")) == ("failed", "0")
    assert service.shown("ExecMainStatus") == "3"


def test_another_user_is_served_and_reads_what_he_may(service: Service) -> None:
    service.install("--cpu", "--run-as", "games", settings="TimeoutStopSec=3")
    service.configure()
    pid = service.start()
    paths = (f"{service.runtime}/control.sock", service.runtime)
    owner = service.machine.run("stat", "-c", "%U %a", *paths).stdout
    assert owner.split() == ["games", "600", "games", "700"]
    assert re.search(r"^Uid:\s+5\s", service.machine.run("cat", f"/proc/{pid}/status").stdout, re.M)
    daemon = service.shown("MainPID")
    assert service.systemctl("restart", SERVICE) == 0
    assert service.until_ready(daemon)["engine"]["pid"] == pid
    service.kill("STOP", service.shown("MainPID"))
    service.machine.run("systemctl", "stop", SERVICE, check=False)
    assert service.processes() == ""


class Recipe:
    """The unit of `docs/recipes` that runs llama-server, with the paths and port of this machine.

    It lingers for longer than any machine takes from one look to the next.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.url = f"http://127.0.0.1:{service.port}"

    def write(self, n_ctx: int) -> None:
        """Have the unit say this context."""
        text = (TREE / "docs/recipes" / RECIPE).read_text()
        for here, there in (
            ("ExecStart=llamactl ", f"ExecStart={PYTHON} -m llamactl_cli "),
            ("-- llama-server --model /models/model.gguf", "-- /opt/engine/llama-server "),
            ("-c 8192", f"--model /opt/model.gguf -c {n_ctx}"),
            ("--port 8080", f"--port {self.service.port}"),
            ("--linger 30", "--linger 3600"),
        ):
            assert here in text
            text = text.replace(here, there)
        own = f"{self.service.units}/{RECIPE}.d/90-test.conf"
        self.service.machine.write(own, f"[Service]\nEnvironment=PYTHONPATH={PYTHON_PATH}\n")
        self.service.machine.write(f"{self.service.units}/{RECIPE}", text)
        assert self.service.systemctl("daemon-reload") == 0

    def serves(self, n_ctx: int) -> bool:
        """Whether the port answers with this context."""
        try:
            props = httpx.get(f"{self.url}/props", timeout=60).json()
        except httpx.TransportError:
            return False
        return bool(props.get("context_geometry", {}).get("n_ctx") == n_ctx)

    def close(self) -> None:
        """Take it away."""
        self.service.systemctl("stop", RECIPE)
        units = f"{self.service.units}/{RECIPE}"
        self.service.machine.run("rm", "-rf", units, f"{units}.d")


def test_a_restart_of_the_recipes_unit_changes_the_live_engine(service: Service) -> None:
    """The engine is the other unit's: it outlives this one, for as long as that lingers."""
    service.install("--cpu")
    with contextlib.closing(Recipe(service)) as recipe:
        recipe.write(8192)
        assert service.systemctl("start", RECIPE) == 0
        until(lambda: recipe.serves(8192), within_s=60)
        pid, daemon = service.status()["engine"]["pid"], service.shown("MainPID")
        cgroup = service.run("cat", f"/proc/{pid}/cgroup").stdout
        assert cgroup.endswith(f"/{SERVICE}\n")

        recipe.write(16384)
        assert service.systemctl("restart", RECIPE) == 0
        until(lambda: recipe.serves(16384), within_s=60)
        status = service.status()
        assert (status["engine"]["pid"], status["weight_loads"]) == (pid, 1)
        assert status["owner"]["port"] == service.port
        assert service.shown("MainPID") == daemon

        assert service.systemctl("stop", RECIPE) == 0
        ended = service.run("systemctl", "show", RECIPE, "--property=Result", "--value").stdout
        assert ended == "success\n"
        with pytest.raises(httpx.ConnectError):
            httpx.get(recipe.url, timeout=60)
        until(lambda: service.status()["owner"] is None)
        status = service.status()
        assert (status["engine"]["pid"], status["state"]) == (pid, "ready")
        assert 0 < status["lingers_s"] <= 3600
    assert service.systemctl("stop", SERVICE) == 0
    assert service.processes() == ""
