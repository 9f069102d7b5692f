"""The API server alone: a real one, that forgets everything when the tests end."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from localcluster import processes, standalone, steps
from localcluster.handle import ClusterHandle
from localcluster.steps import ClusterError

pytestmark = pytest.mark.apiserver


def test_it_validates_stores_and_returns_objects(apiserver: ClusterHandle) -> None:
    with apiserver.namespace() as namespace:
        settings = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "settings", "namespace": namespace},
            "data": {"colour": "green"},
        }
        apiserver.apply(settings)
        found = apiserver.get("configmap", "settings", "--namespace", namespace)
        assert found["data"] == {"colour": "green"}

        refused = apiserver.try_kubectl(
            "create", "configmap", "Not_A_Name", "--namespace", namespace
        )
        assert refused.returncode == 1
        assert "Invalid value" in refused.stderr


def test_two_run_side_by_side_and_leave_nothing(apiserver: ClusterHandle) -> None:
    with standalone.temporary("other") as layout:
        assert layout.state.exists()
        assert len(processes.running(layout.state)) == 2
        assert apiserver.layout is not None
        assert layout.ports.apiserver != apiserver.layout.ports.apiserver
    assert processes.running(layout.state) == {}
    assert not layout.state.exists()
    assert apiserver.kubectl("get", "--raw", "/readyz") == "ok"


def test_a_component_that_dies_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "etcd").write_text("not a folder")
    with pytest.raises(
        ClusterError, match=r"etcd ended by itself; the end of .*etcd\.log"
    ) as error:
        standalone.start(state, tmp_path / "kubeconfig", "broken", with_controllers=False)
    assert "not a directory" in str(error.value)
    assert processes.running(state) == {}


KEEPER = """
import sys
from localcluster import standalone
with standalone.temporary("orphan") as layout:
    print(layout.state, flush=True)
    sys.stdin.read()
"""


def test_it_ends_with_its_test_run_even_when_that_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", KEEPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as keeper:
        assert keeper.stdout is not None
        state = Path(keeper.stdout.readline().strip())
        assert len(processes.running(state)) == 2
        keeper.kill()
    steps.wait_until(lambda: processes.running(state) == {}, "nothing runs", 10)
    shutil.rmtree(state.parent)
