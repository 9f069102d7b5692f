"""Names, Services and limits as Pods and this machine see them; bodies are checked, not statuses."""

import subprocess
from pathlib import Path

import pytest
from localcluster import build, probes, sandbox, steps
from localcluster.handle import ClusterHandle
from localcluster.layout import SLOTS, with_node
from localcluster.probes import Probes

pytestmark = pytest.mark.cluster

UNSERVED = -2  # the last address of the Service range: never given out in a test


def unserved_address(cluster: ClusterHandle) -> str:
    assert cluster.layout is not None
    return str(cluster.layout.service_range[UNSERVED])


def test_pods_reach_a_service_by_its_name(probe: Probes) -> None:
    probe.serve("greeter", "hello from the greeter")
    for number, name in enumerate(
        ("greeter", f"greeter.{probe.namespace}.svc.cluster.local"), start=1
    ):
        ended, printed = probe.run(f"by-name-{number}", "get", f"http://{name}/")
        assert (ended["exitCode"], printed) == (0, "200 hello from the greeter")


def test_this_machine_reaches_pods_and_services(probe: Probes) -> None:
    service = probe.serve("greeter", "hello from the greeter")
    pod = probe.wait("greeter", lambda pod: bool(pod["status"].get("podIP")))
    answer = (True, "200 hello from the greeter")
    assert probes.from_this_machine("get", f"http://{pod['status']['podIP']}:8080/") == answer
    # kube-proxy writes its rules a moment after the Pod is ready.
    steps.wait_until(
        lambda: probes.from_this_machine("get", f"http://{service}/") == answer,
        "the Service answers",
        timeout_seconds=10,
    )


def test_an_unserved_service_address_is_refused_from_everywhere(probe: Probes) -> None:
    address = unserved_address(probe.cluster)
    reached, printed = probes.from_this_machine("get", f"http://{address}/")
    assert not reached
    assert "connection refused" in printed

    ended, printed = probe.run("unserved", "get", f"http://{address}/")
    assert ended["exitCode"] == 1
    assert "connection refused" in printed

    from_node = probe.cluster.run_on_node("bash", "-c", f": </dev/tcp/{address}/80")
    assert from_node.returncode != 0
    assert "Connection refused" in from_node.stderr


def test_service_addresses_are_refused_before_and_after_there_is_a_cluster() -> None:
    layout = with_node("bare", SLOTS - 2, Path("/nowhere"))
    address = layout.service_range[UNSERVED]
    url = f"http://{address}/"
    sandbox.create(layout)  # nothing runs in it: no kube-proxy has written a rule yet
    try:
        assert "connection refused" in probes.from_this_machine("get", url)[1]
        inside = sandbox.run_inside(layout, [str(build.path("probe")), "get", url])
        assert "connection refused" in inside.stdout
        # Even with the link torn out, nothing leaves for the world.
        subprocess.run(["ip", "link", "del", layout.identity], check=True)
        assert "no route to host" in probes.from_this_machine("get", url)[1]
    finally:
        sandbox.destroy(layout)
    routes = subprocess.check_output(["ip", "route"], text=True)
    assert str(layout.service_range) not in routes


def test_a_service_without_pods_is_refused(probe: Probes) -> None:
    service = probe.serve("greeter", "hello")
    probe.cluster.kubectl("delete", "pod", "greeter", "--namespace", probe.namespace)
    steps.wait_until(
        lambda: "connection refused" in probes.from_this_machine("get", f"http://{service}/")[1],
        "the Service refuses",
        timeout_seconds=10,
    )


def test_names_of_the_world_do_not_exist_and_are_answered_at_once(probe: Probes) -> None:
    ended, printed = probe.run("lookup", "resolve", "www.example.com")
    assert ended["exitCode"] == 1
    assert "no such host" in printed


def test_pods_have_no_way_out(probe: Probes) -> None:
    ended, printed = probe.run("outside", "dial", "1.1.1.1:80")
    assert ended["exitCode"] == 1
    assert "unreachable" in printed


def test_a_cpu_limit_holds(probe: Probes) -> None:
    ended, printed = probe.run("burner", "burn", "4", limits={"cpu": "300m"})
    assert ended["exitCode"] == 0
    # Cores used: never above the limit by more than one 100 ms period's rounding.
    assert 0 < float(printed) < 0.36


def test_a_memory_limit_ends_the_container(probe: Probes) -> None:
    probe.start("greedy", "allocate", "200", limits={"memory": "64Mi"})
    pod = probe.wait("greedy", lambda pod: pod["status"].get("phase") == "Failed")
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)


def test_exec_and_port_forward_reach_the_kubelet(probe: Probes) -> None:
    probe.serve("greeter", "hello")
    printed = probe.cluster.kubectl(
        *("exec", "greeter", "--namespace", probe.namespace, "--"),
        *("/probe", "get", "http://127.0.0.1:8080/"),
    )
    assert printed.strip() == "200 hello"
