"""How quiet the operator is: when nothing happens, under steady traffic, and under permanent faults.

    bench/idle.py [--check]

Three parts, on a control plane without a node, in a network namespace of its own:

- `idle`: three services, each with one replica that is the real sidecar with the real model, as a
  process at its Pod's address. Nobody sends a request for 3 minutes. Writes are counted in the API
  server's audit log.
- `steady`: the same services under a steady Poisson stream of requests, 3 minutes. Status writes.
- `faults`: 50 services that can't work, in five ways (see `FAULTS`), for 5 minutes, with Prometheus down
  all the time. Events about the services, those that tell of made children apart, and log bytes.

Needs root (for the namespace) and the model's files (`kvscaler_sidecar.weights.builtin`).
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import harness
from harness import ROOT, Figure, progress

for _folder in (ROOT, ROOT / "hack" / "cluster"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

from kvscaler_operator.resources import (  # noqa: E402 - a clone runs without being installed
    CONFIG_MAPS,
    INFERENCE_SERVICES,
    PODS,
    SERVICES,
    Object,
)
from kvscaler_sidecar.weights import builtin  # noqa: E402
from localcluster.steps import ClusterError  # noqa: E402

from hack.fleet.page import Page  # noqa: E402
from hack.fleet.world import World, WorldError, enter_network, service, until  # noqa: E402

QUIET, BROKEN = "quiet", "broken"
SERVICE_COUNT, FAULTY_OF_A_KIND = 3, 10
SETTLE_SECONDS = 60.0
IDLE_SECONDS = STEADY_SECONDS = 180.0
FAULT_SECONDS = 300.0
REQUESTS_PER_SECOND = 0.3
REQUEST = {"model": "smollm2-135m", "prompt": "Once upon a time", "max_tokens": 24}
IMAGE_WORDS_SECONDS = 15.0
MODEL = "builtin://smollm2-135m"
MIB = 1 << 20
OPERATOR_FLAGS = ("--lease-duration-seconds", "60")
OPERATOR_AGENT = "kvscaler-operator/"
"""How the operator's client calls itself in the audit log; the bench's own has another name."""

FAULTS: Mapping[str, str] = {
    "silent": "Pods are ready and never answer, and Prometheus is down",
    "image": "the image does not exist; the kubelet says so in ever other words",
    "facts": "the model is in no catalogue, and no replica tells about it",
    "unfit": "the model does not fit the accelerator",
    "taken": "the name of a child is somebody else's",
}


@dataclass
class Findings:
    """What was counted."""

    idle_writes: Counter[str] = field(default_factory=Counter)
    status_writes: dict[str, float] = field(default_factory=dict)
    """Per minute, by service."""
    steady_writes: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    events: dict[str, int] = field(default_factory=dict)
    """By service, children's creation apart."""
    event_reasons: Counter[str] = field(default_factory=Counter)
    log_bytes: int = 0
    fault_writes: Counter[str] = field(default_factory=Counter)
    conditions: Counter[str] = field(default_factory=Counter)
    """What the faulty services said of themselves, as a proof that they were faulty."""


def written(world: World, since: datetime, upto: datetime) -> list[dict[str, Any]]:
    """Writes of the operator between two times, from the audit log; Leases apart.

    Raises `WorldError` when not even Lease renewals are in it: then it shows nothing at all.
    """
    found, renewals = [], 0
    with world.audit_log.open() as log:
        for line in log:
            entry = json.loads(line)
            at = datetime.fromisoformat(entry["requestReceivedTimestamp"])
            if not since <= at < upto or not entry.get("userAgent", "").startswith(OPERATOR_AGENT):
                continue
            if entry.get("objectRef", {}).get("resource") == "leases":
                renewals += 1
            else:
                found.append(entry)
    if not renewals:
        raise WorldError("the audit log has no Lease renewal by the operator: it shows nothing")
    return found


def _named(entries: Sequence[dict[str, Any]]) -> Counter[str]:
    return Counter(
        f"{e['verb']} {e['objectRef']['resource']}"
        + (f"/{s}" if (s := e["objectRef"].get("subresource")) else "")
        for e in entries
    )


async def serve(world: World) -> None:
    """Make the services, and for the Pod of each the real sidecar at its address."""
    folder = builtin.ensure(MODEL)
    for number in range(SERVICE_COUNT):
        spec = {
            "model": {"uri": MODEL, "maxContextTokens": 384, "servedNames": ["smollm2-135m"]},
            # There is one process for each service; a second Pod would be one that never answers.
            "scaling": {"mode": "Managed", "maxReplicas": 1},
        }
        await world.kube.create(INFERENCE_SERVICES, service(QUIET, f"s{number}", **spec))
    pods: list[Object] = []

    async def addressed() -> bool:
        pods[:] = (await world.kube.list(PODS, QUIET)).items
        return len([p for p in pods if (p.get("status") or {}).get("podIP")]) == SERVICE_COUNT

    await until(addressed, "every service has a Pod", 120)
    for pod in pods:
        await _start_sidecar(world, pod, folder.parent)

    async def limited() -> bool:
        return await _say(world, QUIET, "LimitsApplied", "True") == SERVICE_COUNT

    await until(limited, "all replicas serve with their limits", 180)


async def _start_sidecar(world: World, pod: Object, models: Path) -> None:
    container = pod["spec"]["containers"][0]
    environment: dict[str, str] = {}
    keys = world.log("keys").with_suffix("")
    keys.mkdir(exist_ok=True)
    for entry in container["env"]:
        source = entry.get("valueFrom") or {}
        if "configMapKeyRef" in source:
            wanted = source["configMapKeyRef"]
            data = await world.kube.get(CONFIG_MAPS, QUIET, wanted["name"])
            environment[entry["name"]] = data["data"][wanted["key"]]
        elif "fieldRef" in source:
            environment[entry["name"]] = pod["metadata"][
                source["fieldRef"]["fieldPath"].removeprefix("metadata.")
            ]
        else:
            environment[entry["name"]] = entry["value"]
    public = await world.kube.get(CONFIG_MAPS, QUIET, f"{_owner(pod)}-admin-keys")
    for name, text in public["data"].items():
        (keys / name).write_text(text)
    environment |= {
        "KVSCALER_HOST": pod["status"]["podIP"],
        "KVSCALER_MODELS_DIR": str(models),
        "KVSCALER_ADMIN_KEYS_DIR": str(keys),
        "KVSCALER_TERMINATION_LOG": "/dev/null",
        "KVSCALER_THREADS": "1",
    }
    world.run(pod["metadata"]["name"], sys.executable, "-m", "kvscaler_sidecar.main", "serve",
              environment=environment)  # fmt: skip


def _owner(pod: Object) -> str:
    return str(pod["metadata"]["labels"]["app.kubernetes.io/instance"])


async def _say(world: World, namespace: str, kind: str, status: str) -> int:
    """Services of a namespace that say so."""
    listed = await world.kube.list(INFERENCE_SERVICES, namespace)
    return sum(
        any(c["type"] == kind and c["status"] == status for c in _conditions(obj))
        for obj in listed.items
    )


def _conditions(obj: Object) -> list[Object]:
    return list((obj.get("status") or {}).get("conditions") or ())


async def send(world: World, seconds: float, found: Findings) -> None:
    """A Poisson stream to each replica."""
    ends = time.monotonic() + seconds
    source = random.Random(1)
    pods = (await world.kube.list(PODS, QUIET)).items
    open_requests: set[asyncio.Task[None]] = set()

    async def one(ip: str) -> None:
        try:
            url = f"http://{ip}:8000/v1/completions"
            async with world.http.post(url, json=REQUEST) as response:
                await response.read()
                found.requests[str(response.status)] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            found.requests[type(error).__name__] += 1

    async def stream(ip: str) -> None:
        while time.monotonic() < ends:
            await asyncio.sleep(source.expovariate(REQUESTS_PER_SECOND))
            task = asyncio.create_task(one(ip))
            open_requests.add(task)
            task.add_done_callback(open_requests.discard)

    await asyncio.gather(*(stream(pod["status"]["podIP"]) for pod in pods))
    await asyncio.gather(*open_requests)


async def quiet(world: World, found: Findings) -> None:
    """The first two parts."""
    progress(f"three services with real replicas; settling for {SETTLE_SECONDS:.0f} s")
    await serve(world)
    await asyncio.sleep(SETTLE_SECONDS)
    begun = datetime.now(UTC)
    progress(f"  idle for {IDLE_SECONDS:.0f} s")
    await asyncio.sleep(IDLE_SECONDS)
    found.idle_writes = _named(written(world, begun, datetime.now(UTC)))
    progress(f"  writes: {dict(found.idle_writes)}; steady traffic for {STEADY_SECONDS:.0f} s")
    await send(world, 30.0, Findings())  # what changes because traffic begins is not steady
    begun = datetime.now(UTC)
    await send(world, STEADY_SECONDS, found)
    ended = datetime.now(UTC)
    entries = written(world, begun, ended)
    if not found.requests["200"]:
        raise WorldError(f"no request was answered: {dict(found.requests)}")
    found.steady_writes = _named(entries)
    minutes = (ended - begun).total_seconds() / 60.0
    counts = Counter(
        e["objectRef"]["name"] for e in entries if e["objectRef"].get("subresource") == "status"
    )
    found.status_writes = {
        f"s{n}": round(counts[f"s{n}"] / minutes, 2) for n in range(SERVICE_COUNT)
    }
    progress(f"  status writes a minute: {found.status_writes}")
    for pod in (await world.kube.list(PODS, QUIET)).items:
        world.end(pod["metadata"]["name"])
    for number in range(SERVICE_COUNT):
        obj = await world.kube.get(INFERENCE_SERVICES, QUIET, f"s{number}")
        uid = obj["metadata"]["uid"]
        await world.kube.delete(INFERENCE_SERVICES, QUIET, f"s{number}", uid)


def _spec_of(fault: str) -> dict[str, Any]:
    if fault == "facts":
        return {"model": {"uri": "builtin://unknown", "maxContextTokens": 2048}}
    if fault == "unfit":
        template: dict[str, Any] = service(BROKEN, "x")["spec"]["template"]
        template["spec"]["containers"][0]["resources"]["limits"]["memory"] = "256Mi"
        return {"template": template}
    return {}


async def break_services(world: World) -> None:
    """Make the services that can't work."""
    for fault in FAULTS:
        for number in range(FAULTY_OF_A_KIND):
            name = f"{fault}-{number}"
            if fault == "taken":
                port = {"name": "x", "port": 1}
                foreign = {
                    "apiVersion": "v1",
                    "kind": "Service",
                    "metadata": {"namespace": BROKEN, "name": name},
                    "spec": {"ports": [port]},
                }
                await world.kube.create(SERVICES, foreign)
            await world.kube.create(INFERENCE_SERVICES, service(BROKEN, name, **_spec_of(fault)))


async def deny_images(world: World) -> None:
    """Say of the Pods of `image` services what a kubelet says, in its two ways by turns."""
    turn = 0
    while True:
        turn += 1
        backing_off = turn % 2 == 0
        reason = "ImagePullBackOff" if backing_off else "ErrImagePull"
        words = f"Back-off pulling image, try {turn}" if backing_off else f"not found, try {turn}"
        for pod in (await world.kube.list(PODS, BROKEN)).items:
            if _owner(pod).startswith("image-") and (pod.get("status") or {}).get("podIP"):
                status = {
                    "conditions": [
                        {"type": "Ready", "status": "False"},
                        {"type": "PodScheduled", "status": "True"},
                    ],
                    "containerStatuses": [
                        {
                            "name": "engine",
                            "image": "none",
                            "imageID": "",
                            "ready": False,
                            "restartCount": 0,
                            "state": {"waiting": {"reason": reason, "message": words}},
                        }
                    ],
                }
                await world.kube.merge(
                    PODS, BROKEN, pod["metadata"]["name"], {"status": status}, "status"
                )
        await asyncio.sleep(IMAGE_WORDS_SECONDS)


async def faults(world: World, found: Findings) -> None:
    """The third part."""
    count = len(FAULTS) * FAULTY_OF_A_KIND
    progress(f"{count} services that can't work, for {FAULT_SECONDS:.0f} s")
    begun, log_before = datetime.now(UTC), world.log("operator").stat().st_size
    await break_services(world)
    denying = asyncio.create_task(deny_images(world))
    await asyncio.sleep(FAULT_SECONDS)
    denying.cancel()
    with suppress(asyncio.CancelledError):
        await denying
    found.log_bytes = world.log("operator").stat().st_size - log_before
    services = await world.kube.list(INFERENCE_SERVICES, BROKEN)
    found.events = {obj["metadata"]["name"]: 0 for obj in services.items}
    events = await world.reader.get(f"/apis/events.k8s.io/v1/namespaces/{BROKEN}/events")
    for event in events["items"]:
        if event["regarding"]["kind"] != "InferenceService":
            continue
        found.event_reasons[event["reason"]] += 1
        if event["reason"] != "ChildCreated":
            found.events[event["regarding"]["name"]] += 1
    found.fault_writes = _named(written(world, begun, datetime.now(UTC)))
    for obj in services.items:
        for condition in _conditions(obj):
            if condition["status"] != "True":
                fault = obj["metadata"]["name"].rsplit("-", 1)[0]
                found.conditions[f"{fault}: {condition['type']}={condition['reason']}"] += 1


async def measure() -> Findings:
    """All three parts."""
    found = Findings()
    async with World(4, audit=True) as world:
        await world.make_namespace(QUIET)
        await world.make_namespace(BROKEN)
        world.start_operator(*OPERATOR_FLAGS)  # nothing listens where its Prometheus should be
        await world.until_ready(60)
        await quiet(world, found)
        await faults(world, found)
        page = Page(await world.metrics())
        if not page.total("rest_client_requests_total"):
            raise WorldError("the operator counted no request: nothing was measured")
        world.keep_log("operator", ROOT / "build" / "idle")
    return found


def figures(found: Findings) -> list[Figure]:
    """The figures with their floors."""
    return [
        Figure("idle_writes", float(found.idle_writes.total()), "1", "<= 0",
               why="audit log, 3 minutes, Leases apart"),
        Figure("steady_status_writes_per_minute", max(found.status_writes.values(), default=None),
               "1/min", "<= 2", why="the service with the most"),
        Figure("events_per_faulty_service", float(max(found.events.values())), "1", "<= 1",
               why="the service with the most; created children apart"),
        Figure("fault_log", round(found.log_bytes / MIB, 3), "MiB", "<= 1"),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the report."""
    options = harness.arguments(__doc__).parse_args(argv)
    try:
        enter_network(sys.argv)
        found = asyncio.run(measure())
    except (WorldError, ClusterError) as error:
        progress(f"idle: {error}")
        return 2
    detail = {
        "idle_writes": dict(found.idle_writes),
        "steady_writes": dict(found.steady_writes),
        "steady_status_writes_per_minute": found.status_writes,
        "steady_requests": dict(found.requests),
        "faults": dict(FAULTS),
        "fault_writes": dict(found.fault_writes),
        "fault_event_reasons": dict(found.event_reasons),
        "fault_conditions": dict(sorted(found.conditions.items())),
    }
    return harness.report("idle", figures(found), detail, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
