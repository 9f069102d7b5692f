"""One service on the cluster, as its users see it: the API server, its Pods, and streams."""

import asyncio
import copy
import json
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from localcluster.handle import ClusterHandle

from hack.demo.kube import Kube
from hack.demo.observe import Observer, PodSample, Sample
from hack.demo.traffic import Request, Result, send

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2.yaml"
MODEL = "smollm2-135m"
POLL_SECONDS = 0.25
STREAM_DEADLINE_SECONDS = 200.0
Object = dict[str, Any]
Words = str | Callable[[], str]
"""What is waited for; made when it is told, so that it can hold what was seen last."""


def example(namespace: str, name: str, **spec: Any) -> Object:
    """The example's service with a whole CPU, not scaled by the operator; `spec` replaces fields."""
    service: Object = copy.deepcopy(yaml.safe_load(EXAMPLE.read_text("utf-8")))
    service["metadata"] = {"name": name, "namespace": namespace}
    service["spec"]["scaling"] |= {"mode": "Advisory", "maxReplicas": 3}
    service["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "1"
    service["spec"].update(spec)
    return service


def nowhere(namespace: str, name: str, **spec: Any) -> Object:
    """A service whose Pods fit on no node: it has all its children and costs nothing."""
    service = example(namespace, name, **spec)
    service["spec"]["template"]["spec"]["nodeSelector"] = {"kvscaler.io/no-such-node": "true"}
    return service


async def eventually(
    check: Callable[[], Awaitable[Any]], what: Words, seconds: float = 120.0
) -> Any:
    """Poll until `check` gives something true, and return it."""
    deadline = time.monotonic() + seconds
    while True:
        # A connection that is cut is not an answer; the deadline still counts.
        with suppress(aiohttp.ClientConnectionError, TimeoutError):
            found = await check()
            if found:
                return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {_said(what)}")
        await asyncio.sleep(POLL_SECONDS)


async def stays(check: Callable[[], Awaitable[bool]], what: Words, seconds: float) -> None:
    """Look for `seconds` whether `check` holds, and fail at the first time that it does not."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert await check(), _said(what)
        await asyncio.sleep(POLL_SECONDS)


def _said(what: Words) -> str:
    return what if isinstance(what, str) else what()


class Live:
    """A service by its name, whether it exists or not."""

    def __init__(self, kube: Kube, cluster: ClusterHandle, namespace: str, name: str) -> None:
        self.kube, self.cluster = kube, cluster
        self.namespace, self.name = namespace, name
        self._observer = Observer(kube, namespace, name)

    # --- acting, as a person does ------------------------------------------------------------

    async def kubectl(self, *arguments: str, text: str | None = None) -> str:
        """kubectl in the service's namespace."""
        command = (*arguments, "--namespace", self.namespace)
        return await asyncio.to_thread(self.cluster.kubectl, *command, text=text)

    async def refused(self, *arguments: str, text: str | None = None) -> str:
        """kubectl's words for why it failed."""
        command = (*arguments, "--namespace", self.namespace)
        done: subprocess.CompletedProcess[str] = await asyncio.to_thread(
            self.cluster.try_kubectl, *command, text=text
        )
        assert done.returncode != 0, f"kubectl {' '.join(arguments)} was not refused"
        return done.stderr

    async def apply(self, obj: Object) -> None:
        """kubectl apply."""
        await self.kubectl("apply", "--filename=-", text=json.dumps(obj))

    async def patch(self, patch: Object, kind: str = "kvis", name: str | None = None) -> None:
        """kubectl patch with a merge patch."""
        await self.kubectl(
            "patch", kind, name or self.name, "--type=merge", "-p", json.dumps(patch)
        )

    # --- looking -----------------------------------------------------------------------------

    async def find(self, path: str) -> Object | None:
        """An object by its path within the namespace (`apps/v1/deployments/x`), or `None`."""
        group, version, rest = path.split("/", 2)
        root = f"/api/{version}" if group == "core" else f"/apis/{group}/{version}"
        try:
            found: Object = await self.kube.get(f"{root}/namespaces/{self.namespace}/{rest}")
        except aiohttp.ClientResponseError as error:
            if error.status != 404:
                raise
            return None
        return found

    async def deployment(self) -> Object | None:
        """The Deployment of the service."""
        return await self.find(f"apps/v1/deployments/{self.name}")

    async def children(self) -> dict[str, Object]:
        """Everything in the namespace with the service's label or name, by "plural/name"."""
        found: dict[str, Object] = {}
        for group, plural in (
            ("apps/v1", "deployments"), ("apps/v1", "replicasets"), ("core/v1", "pods"),
            ("core/v1", "services"), ("core/v1", "configmaps"),
            ("policy/v1", "poddisruptionbudgets"),
        ):  # fmt: skip
            listing = await self.find(f"{group}/{plural}")
            assert listing is not None
            for item in listing["items"]:
                labels = item["metadata"].get("labels") or {}
                if labels.get("app.kubernetes.io/instance") == self.name:
                    found[f"{plural}/{item['metadata']['name']}"] = item
        return found

    async def service(self) -> Object:
        """The InferenceService."""
        found = await self.find(f"kvscaler.io/v1alpha1/inferenceservices/{self.name}")
        assert found is not None, f"InferenceService {self.name} is gone"
        return found

    async def status(self) -> Object:
        """Its status; empty before the first write."""
        found: Object = (await self.service()).get("status") or {}
        return found

    async def condition(self, kind: str) -> Object:
        """A condition; empty when there is none yet."""
        conditions = (await self.status()).get("conditions") or ()
        return next((c for c in conditions if c["type"] == kind), {})

    async def until(self, kind: str, status: str, *reasons: str, seconds: float = 120.0) -> Object:
        """Wait for a condition with this status, and one of the reasons if any are given."""
        seen: Object = {}

        async def check() -> Object | None:
            nonlocal seen
            seen = await self.condition(kind)
            right = seen.get("status") == status and (not reasons or seen["reason"] in reasons)
            return seen if right else None

        wanted = f"{kind} is {status}/{'|'.join(reasons)}"
        return dict(await eventually(check, lambda: f"{wanted}; it is {seen}", seconds))

    async def sample(self) -> Sample:
        """The object, its Pods and what they report, at one time."""
        return await self._observer.sample()

    async def pods(self) -> list[PodSample]:
        """Pods that are not on their way out."""
        return [pod for pod in (await self.sample()).pods if not pod.terminating]

    async def pod(self, name: str) -> PodSample | None:
        """A Pod by name, as long as it exists."""
        return next((pod for pod in (await self.sample()).pods if pod.name == name), None)

    async def until_ready(self, count: int = 1) -> list[PodSample]:
        """Wait until exactly so many Pods exist, all ready and none terminating, and say so."""
        pods: list[PodSample] = []

        async def check() -> bool:
            nonlocal pods
            pods = (await self.sample()).pods
            return len(pods) == count and all(
                p.ready and not p.terminating and p.state is not None for p in pods
            )

        def words() -> str:
            seen = [(p.name, p.ready, p.terminating, p.last_termination) for p in pods]
            return f"{count} Pods of {self.name} are ready; there are {seen}"

        await eventually(check, words, 180.0)
        await self.until("Ready", "True", "ReplicasReady")
        return pods

    async def address(self) -> str:
        """URL of the service for clients."""
        found = await self.find(f"core/v1/services/{self.name}")
        assert found is not None
        return f"http://{found['spec']['clusterIP']}:8000"


class Streams:
    """Streaming clients that run while a test acts."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._seed = 0

    async def __aenter__(self) -> "Streams":
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None, connect=30)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    def open(self, url: str, output_tokens: int) -> Request:
        """Begin a stream of exactly that many tokens; the record fills itself."""
        self._seed += 1
        prompt = f"Story number {self._seed}: once upon a time"
        request = Request("test", time.monotonic(), len(prompt.split()), output_tokens)
        self.requests.append(request)
        self._spawn(
            send(self._session, url, MODEL, request, prompt, self._seed, STREAM_DEADLINE_SECONDS,
                 ignore_eos=True)
        )  # fmt: skip
        return request

    def keep_open(self, url: str, count: int, output_tokens: int) -> asyncio.Event:
        """Have `count` streams at any time, each that ends followed by another, until set."""
        stop = asyncio.Event()

        async def client() -> None:
            while not stop.is_set():
                request = self.open(url, output_tokens)
                ended = partial(_ended, request)
                await eventually(ended, "a stream ends", STREAM_DEADLINE_SECONDS + 10)

        for _ in range(count):
            self._spawn(client())
        return stop

    async def begun(self) -> None:
        """Wait until every stream has its first token."""

        async def check() -> bool:
            return all(r.first_token_seconds is not None or r.result for r in self.requests)

        await eventually(check, "every stream has begun")

    async def whole(self) -> None:
        """Wait for the end of all streams, each with all its tokens, usage and end mark."""

        async def check() -> bool:
            return all(task.done() for task in self._tasks)

        await eventually(check, "all streams have ended", STREAM_DEADLINE_SECONDS)
        for task in self._tasks:
            task.result()
        told = [(r.result, r.reason, r.output_tokens) for r in self.requests]
        assert told == [(Result.OK, "", r.max_tokens) for r in self.requests]

    def _spawn(self, work: Any) -> None:
        self._tasks.add(asyncio.create_task(work))


async def _ended(request: Request) -> bool:
    return request.result is not None
