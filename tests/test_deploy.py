"""What is deployed is valid, closed, and speaks of the program as it is."""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from cli_home import Home
from container_file import stages
from llamactl_supervisor import config
from llamactl_supervisor.config import Paths, Settings

TREE = Path(__file__).parents[1]
DEPLOY = TREE / "deploy"
CONFIG = DEPLOY / "config" / config.FILE_NAME
BUILD, IMAGE = stages(DEPLOY / "Containerfile")
KUSTOMIZATION = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICE = COMPOSE["services"]["llamactl"]
OLDEST, NEWEST = "1.27", kubernetes_validate.latest_version()
LADDER = ("drain_s", "carry_s", "stop_term_s", "holder_exit_s", "close_s")
"""What a stop may take, one after the other."""


def rendered() -> dict[str, Any]:
    """Return each manifest by its kind, the generated ones as kustomize makes them."""
    found = [yaml.safe_load((DEPLOY / name).read_text()) for name in KUSTOMIZATION["resources"]]
    for made in KUSTOMIZATION["configMapGenerator"]:
        found.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": made["name"]},
                "data": {Path(name).name: (DEPLOY / name).read_text() for name in made["files"]},
            }
        )
    return {manifest["kind"]: manifest for manifest in found}


MANIFESTS = rendered()
SET = MANIFESTS["StatefulSet"]["spec"]
POD = SET["template"]["spec"]
(CONTAINER,) = POD["containers"]
LOADED = config.load(IMAGE.env, file=CONFIG)


def seconds(text: str) -> int:
    """Return a duration of compose, which is in seconds here."""
    return int(text.removesuffix("s"))


# --- by the published schemas ---------------------------------------------------------------------


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("kind", MANIFESTS)
def test_manifests_are_what_kubernetes_takes(kind: str, version: str) -> None:
    kubernetes_validate.validate(MANIFESTS[kind], version, strict=True)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_a_field_that_kubernetes_does_not_know_is_refused(version: str) -> None:
    """The test above would see one."""
    wrong = copy.deepcopy(MANIFESTS["StatefulSet"])
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenessProb"):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_makes_of_it_what_is_validated_here() -> None:
    done = subprocess.run(
        ("kubectl", "kustomize", DEPLOY), capture_output=True, text=True, check=True
    )
    made = {manifest["kind"]: manifest for manifest in yaml.safe_load_all(done.stdout)}
    assert made == MANIFESTS


@pytest.mark.skipif(
    importlib.util.find_spec("compose_spec") is None, reason="no compose-spec for this machine"
)
def test_the_compose_file_is_what_compose_takes() -> None:
    from compose_spec import PyCompose

    text = (DEPLOY / "compose.yaml").read_text()
    assert PyCompose.from_yaml(text).service_names() == ["llamactl"]
    with pytest.raises(ValueError, match="stop_grase_period"):
        PyCompose.from_yaml(text.replace("stop_grace_period", "stop_grase_period"))


# --- the image ------------------------------------------------------------------------------------


def test_what_is_copied_is_there() -> None:
    for sources, _, stage in (*BUILD.copies, *IMAGE.copies):
        for source in sources:
            if stage is None:
                assert (TREE / source).exists(), source
    installed = {target for _, target, stage in IMAGE.copies if stage is not None}
    built = " ".join(BUILD.all("RUN"))
    assert installed == {"/opt/llamactl", "/opt/engine"}
    assert all(path in built for path in installed)


def test_everything_of_the_distribution_is_copied() -> None:
    """What the wheel is made of, as pyproject.toml has it."""
    copied = {source for sources, _, _ in BUILD.copies for source in sources}
    assert {"pyproject.toml", "README.md", "LICENSE"} < copied
    assert {"builder", "cli", "supervisor", "validate", "patches"} < copied


def test_its_commands_are_llamactls(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert "llamactl build" in " ".join(BUILD.all("RUN"))
    assert "--cmake-arg" in home.run("build", "--help").out
    assert IMAGE.cmd == ["llamactl", "serve", "--watch"]
    assert "--watch" in home.run("serve", "--help").out


def test_its_environment_means_something() -> None:
    assert config.mistyped(IMAGE.env) == {}
    assert config.load(IMAGE.env).config.engine.engine_path == "/opt/engine/llama-server"
    assert POD["enableServiceLinks"] is False  # LLAMACTL_PORT=tcp://... and the like


def test_it_is_not_root_and_has_no_health_check() -> None:
    """A health check would start a Python each time; the probes are a request each."""
    assert IMAGE.uid != 0
    assert IMAGE.all("HEALTHCHECK") == []
    assert IMAGE.entrypoint == ["/usr/bin/tini", "--", "/opt/llamactl/bin/respawn"]
    assert "tini" in " ".join(IMAGE.all("RUN")).split()


# --- the configuration ----------------------------------------------------------------------------


def test_the_configuration_brings_an_engine_up() -> None:
    request = LOADED.config.engine.request()
    assert request is not None
    assert request.spec.model == "/models/model.gguf"
    assert request.spec.host == "0.0.0.0"
    assert LOADED.config.daemon.on_failed == "exit"


def test_it_lies_where_the_daemon_looks_for_it() -> None:
    """As a directory: a file alone, or a subPath, stays the old one for ever."""
    directory = str(config.SYSTEM_FILE.parent)
    (volume,) = (v for v in POD["volumes"] if "configMap" in v)
    (mount,) = (m for m in CONTAINER["volumeMounts"] if m["name"] == volume["name"])
    assert mount == {"name": volume["name"], "mountPath": directory, "readOnly": True}
    assert volume["configMap"] == {"name": MANIFESTS["ConfigMap"]["metadata"]["name"]}
    assert list(MANIFESTS["ConfigMap"]["data"]) == [config.SYSTEM_FILE.name]
    assert f"./config:{directory}:ro" in SERVICE["volumes"]


def test_a_change_of_it_makes_no_pod() -> None:
    assert KUSTOMIZATION["generatorOptions"] == {"disableNameSuffixHash": True}
    assert "annotations" not in SET["template"]["metadata"]
    assert "immutable" not in MANIFESTS["ConfigMap"]
    assert CONTAINER["args"] == IMAGE.cmd


# --- everybody speaks of the same -----------------------------------------------------------------


def test_ports_agree() -> None:
    engine = LOADED.config.engine.port
    probes = LOADED.config.api.probes_listen
    assert probes is not None
    named = {"http": engine, "probes": probes.port}
    assert {port["name"]: port["containerPort"] for port in CONTAINER["ports"]} == named
    service = MANIFESTS["Service"]["spec"]["ports"]
    assert {port["targetPort"]: port["port"] for port in service} == named
    assert IMAGE.ports == set(named.values())
    assert SERVICE["ports"] == [f"127.0.0.1:{port}:{port}" for port in named.values()]


def test_names_and_the_version_agree() -> None:
    labels = SET["selector"]["matchLabels"]
    assert SET["template"]["metadata"]["labels"] == labels
    assert MANIFESTS["Service"]["spec"]["selector"] == labels
    assert SET["serviceName"] == MANIFESTS["Service"]["metadata"]["name"]
    claims = {v["persistentVolumeClaim"]["claimName"] for v in POD["volumes"] if len(v) == 2
              and "persistentVolumeClaim" in v}  # fmt: skip
    assert claims == {MANIFESTS["PersistentVolumeClaim"]["metadata"]["name"]}
    image = f"llamactl:{metadata.version('llamactl-sidecar')}"
    assert CONTAINER["image"] == SERVICE["image"] == image


def test_directories_are_inside_of_volumes() -> None:
    """Inside: a mount point belongs to the runtime, and ours have to be private."""
    paths = Paths.from_env(IMAGE.env)
    mounts = {m["mountPath"] for m in CONTAINER["volumeMounts"] if not m.get("readOnly")}
    assert mounts == {str(paths.state.parent), str(paths.runtime.parent), "/tmp"}
    assert paths.cache.parent == paths.state.parent
    assert IMAGE.last("VOLUME") == str(paths.state.parent)
    assert f"state:{paths.state.parent}" in SERVICE["volumes"]
    (tmpfs,) = SERVICE["tmpfs"]
    assert tmpfs == f"{paths.runtime.parent}:uid={IMAGE.uid},gid={IMAGE.uid},mode=0700"
    models = str(Path(LOADED.config.engine.model or "").parent)
    assert {"name": "models", "mountPath": models, "readOnly": True} in CONTAINER["volumeMounts"]
    assert f"./models:{models}:ro" in SERVICE["volumes"]


def test_the_user_agrees() -> None:
    pod = POD["securityContext"]
    assert {pod[name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {IMAGE.uid}


# --- life and death -------------------------------------------------------------------------------


def test_probes_are_ours() -> None:
    """Liveness is the loop, never the engine; readiness alone knows of loads."""
    published = json.loads((TREE / "docs" / "openapi.json").read_text())["paths"]
    found = {}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = CONTAINER[name]["httpGet"]
        assert asked["port"] == "probes"
        assert "get" in published[asked["path"]]
        found[name] = asked["path"]
    assert found == {
        "startupProbe": "/livez", "readinessProbe": "/readyz", "livenessProbe": "/livez",
    }  # fmt: skip


def test_a_stop_is_waited_for() -> None:
    settings = Settings().model_dump()
    takes = sum(settings[name] for name in LADDER if name in settings)
    assert POD["terminationGracePeriodSeconds"] > takes
    assert seconds(SERVICE["stop_grace_period"]) == POD["terminationGracePeriodSeconds"]


def test_memory_that_is_granted_is_there() -> None:
    resources = CONTAINER["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert SERVICE["mem_limit"] == SERVICE["memswap_limit"]
    assert "cpu" not in resources["limits"]
    threads = dict(zip(*[iter(LOADED.config.engine.extra_args)] * 2, strict=True))["--threads"]
    assert resources["requests"]["cpu"] == threads


def test_nothing_is_privileged() -> None:
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert POD["automountServiceAccountToken"] is False
    assert (SERVICE["read_only"], SERVICE["cap_drop"]) == (True, ["ALL"])
    assert SERVICE["security_opt"] == ["no-new-privileges:true"]


def test_the_state_is_one_pods() -> None:
    assert SET["replicas"] == 1
    (claim,) = SET["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    # "Always" opens what is private to the group, and the daemon refuses what others can enter.
    assert POD["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
