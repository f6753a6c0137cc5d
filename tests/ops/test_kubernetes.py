"""ops/kubernetes.yaml: it fits the schemas of Kubernetes, its parts fit each other, its probes run."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from qmq.settings import Settings
from tests.broker_process import broker_process
from tests.certificates import Authority

ROOT = Path(__file__).parents[2]
FILE = ROOT / "ops" / "kubernetes.yaml"
OBJECTS: dict[str, Any] = {found["kind"]: found for found in yaml.safe_load_all(FILE.read_text("utf-8"))}
POD = OBJECTS["StatefulSet"]["spec"]["template"]["spec"]
(BROKER,) = POD["containers"]
BIN = Path(sys.executable).parent


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_it_fits_the_schemas(version: str) -> None:
    command = [BIN / "kubernetes-validate", "--strict", "--kubernetes-version", version, FILE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" passed for resource ") + done.stderr.count(" passed for resource ") == len(OBJECTS)


def test_selectors_find_the_pods() -> None:
    labels = OBJECTS["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert OBJECTS["Service"]["spec"]["selector"] == labels
    for kind in ("StatefulSet", "PodDisruptionBudget"):
        assert OBJECTS[kind]["spec"]["selector"]["matchLabels"] == labels
    assert OBJECTS["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert OBJECTS["StatefulSet"]["spec"]["serviceName"] == OBJECTS["Service"]["metadata"]["name"]


def test_its_settings_are_those_of_qmq() -> None:
    settings = Settings.model_validate(tomllib.loads(OBJECTS["ConfigMap"]["data"]["qmq.toml"]))
    mounts = {mount["name"]: mount["mountPath"] for mount in BROKER["volumeMounts"]}
    assert settings.data_dir.parent == Path(mounts["data"])
    assert BROKER["args"] == ["serve", "--config", f"{mounts['settings']}/qmq.toml"]
    (port,) = BROKER["ports"]
    assert settings.listen == f"0.0.0.0:{port['containerPort']}"
    assert settings.insecure, "the network policy says who reaches it"
    assert settings.advertise is None, "addresses of pods are used again: a store must not take its id from one"
    (claim,) = OBJECTS["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "data"


def test_a_stop_has_time_and_the_container_few_rights() -> None:
    assert POD["terminationGracePeriodSeconds"] >= 30
    assert POD["securityContext"]["runAsNonRoot"]
    assert BROKER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("probe", ["readinessProbe", "livenessProbe"])
def test_its_probes_tell_whether_a_broker_is_there(probe: str, tmp_path: Path) -> None:
    program, *arguments = BROKER[probe]["exec"]["command"]
    assert program == "qmq"
    authority = Authority(tmp_path / "tls")
    server = authority.issue()
    tls = {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": authority.ca}
    directory = tomllib.loads(OBJECTS["ConfigMap"]["data"]["qmq.toml"])["data_dir"]
    with broker_process(tmp_path / "data", **tls) as broker:
        probed = [BIN / "qmq", *(broker.path if word == directory else word for word in arguments)]
        assert broker.path in probed
        assert subprocess.run(probed, capture_output=True, timeout=60, check=False).returncode == 0
    assert subprocess.run(probed, capture_output=True, timeout=60, check=False).returncode == 1


def test_the_broker_writes_nowhere_but_on_its_volume(tmp_path: Path) -> None:
    """Its root file system is read-only: no file appears in its home, in TMPDIR or in its working directory."""
    home = tmp_path / "home"
    home.mkdir()
    command = [BIN / "qmq", "serve", "--data-dir", tmp_path / "data", "--listen", "127.0.0.1:0"]
    environment = {"HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin:/bin"}
    with subprocess.Popen(
        command, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as broker:
        assert broker.stdout is not None
        assert broker.stdout.readline().startswith("ready on ")
        broker.terminate()
        assert broker.wait(30) == 0
    assert list(home.iterdir()) == []
