"""The API server, through `kubernetes.aio`, in dicts.

Three traps of the client are closed here once: without an explicit content type a patch goes out
as a strategic merge patch and not as an apply; raw responses do not raise on 4xx and 5xx; and its
default timeout is five minutes. Writes pass a token bucket, and all requests are counted. A server
that asks for patience (429 with Retry-After) gets no write before, whichever service it is about.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config

from kvscaler_operator.gateways.late import TooLateError, fence_of_request, give_connections
from kvscaler_operator.gateways.limiter import TokenBucket
from kvscaler_operator.resources import Object, Resource, name_of, namespace_of

FIELD_MANAGER = "kvscaler-operator"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
LIST_PAGE_OBJECTS = 100
"""A page is parsed in one go, in which the event loop stands still: ten milliseconds, not fifty."""
TERMINATING = b"NamespaceTerminating"
"""Cause of a refusal to create anything in a namespace that is being deleted."""
PATIENCE_CAP_SECONDS = 120.0
"""No answer of a server keeps us from asking again for longer than this."""
UNACKNOWLEDGED_SECONDS = 5.0


class KubeError(Exception):
    """A request that the API server answered with an error, or did not answer (`status` 0)."""

    def __init__(self, status: int, reason: str, message: str, what: str) -> None:
        super().__init__(f"{what}: {message or reason} (status {status or 'none'})")
        self.status = status
        self.reason = reason
        self.message = message


class NotFoundError(KubeError):
    """404, or 403 in a namespace that is being deleted: the object is gone, or going."""


class ConflictError(KubeError):
    """409: someone else changed or owns it."""


class InvalidError(KubeError):
    """422 or 400: the server understood the object and refuses what it says."""


class ForbiddenError(KubeError):
    """401 or 403: a missing right, a quota, or an admission policy."""


class UnavailableError(KubeError):
    """No answer, 429 or 5xx: worth another try later."""

    retry_after_seconds: float | None = None


class RequestObserver(Protocol):
    """Whoever counts requests."""

    def request(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """One request has ended with `code` (0: no answer)."""


@dataclass(frozen=True, slots=True)
class Listing:
    """All objects of a kind, and the version of the collection that they were read at."""

    items: list[Object]
    resource_version: int


async def connect(
    kubeconfig: str | None,
    context: str | None,
    unacknowledged_seconds: float = UNACKNOWLEDGED_SECONDS,
    agent: str = FIELD_MANAGER,
) -> kubernetes_client.ApiClient:
    """A client by a kubeconfig file, or by the service account of the Pod that we run in.

    What the server does not acknowledge within `unacknowledged_seconds` is not sent any more.
    `agent` is the name under which requests stand in the server's audit log.
    """
    configuration = kubernetes_client.Configuration()
    if kubeconfig:
        await kubernetes_config.load_kube_config(
            config_file=kubeconfig, context=context, client_configuration=configuration
        )
    else:
        kubernetes_config.load_incluster_config(client_configuration=configuration)
    api = kubernetes_client.ApiClient(configuration=configuration)
    api.user_agent = agent
    give_connections(api, unacknowledged_seconds)
    return api


class KubeGateway:
    """Reads and writes objects. Every method raises a `KubeError` when it could not.

    `limited=False` is for the Lease alone: neither the bucket nor `fence` holds it back.
    """

    def __init__(
        self,
        api: kubernetes_client.ApiClient,
        *,
        writes: TokenBucket | None = None,
        timeout_seconds: float = 15.0,
        observer: RequestObserver | None = None,
        fence: Callable[[], bool] | None = None,
    ) -> None:
        self._api = api
        self._fence = fence
        self._writes = writes or TokenBucket(50.0, 100)
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds, connect=5.0)
        self._observer = observer
        self._patient_until = float("-inf")
        self.write_count = 0
        """Writes sent since the start, Lease renewals left out."""

    async def close(self) -> None:
        """Close the client's connections."""
        await self._api.close()

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        """One object."""
        return await self._call("GET", resource, resource.path(namespace, name))

    async def find(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        """One object, or `None` when it does not exist."""
        try:
            return await self.get(resource, namespace, name)
        except NotFoundError:
            return None

    async def list(
        self, resource: Resource, namespace: str | None = None, label_selector: str = ""
    ) -> Listing:
        """All objects of a kind, page by page, in one namespace or in all."""
        items: list[Object] = []
        version = 0
        async for page in self._pages(resource, namespace, label_selector):
            version = int(page["metadata"]["resourceVersion"])
            items.extend(page.get("items") or ())
        return Listing(items, version)

    async def apply(
        self,
        resource: Resource,
        document: Object,
        *,
        subresource: str | None = None,
        force: bool = True,
        manager: str = FIELD_MANAGER,
        dry_run: bool = False,
    ) -> Object:
        """Server-side apply: we own exactly the fields in `document`.

        With `force=False` a field that someone else owns raises `ConflictError`: that is how a
        child is created without ever adopting an object that appeared under its name.
        """
        query = {"fieldManager": manager, "force": "true" if force else "false"}
        if dry_run:
            query["dryRun"] = "All"
        path = resource.path(namespace_of(document), name_of(document), subresource)
        return await self._patch(resource, path, document, query, APPLY)

    async def merge(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        patch: Object,
        subresource: str | None = None,
    ) -> Object:
        """A JSON merge patch."""
        path = resource.path(namespace, name, subresource)
        query = {"fieldManager": FIELD_MANAGER}
        return await self._patch(resource, path, patch, query, MERGE)

    async def create(self, resource: Resource, document: Object, *, limited: bool = True) -> Object:
        """Create an object; `ConflictError` when the name is taken."""
        path = resource.path(namespace_of(document))
        query = {"fieldManager": FIELD_MANAGER}
        return await self._write("POST", resource, path, document, query, limited=limited)

    async def replace(
        self, resource: Resource, document: Object, *, limited: bool = True
    ) -> Object:
        """Replace an object at the resourceVersion that `document` carries."""
        path = resource.path(namespace_of(document), name_of(document))
        query = {"fieldManager": FIELD_MANAGER}
        return await self._write("PUT", resource, path, document, query, limited=limited)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        """Delete exactly the object with this UID; one that is gone already is fine."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        try:
            await self._write("DELETE", resource, resource.path(namespace, name), body, {})
        except NotFoundError:
            return

    async def _pages(
        self, resource: Resource, namespace: str | None, label_selector: str
    ) -> AsyncIterator[Object]:
        token = ""
        while True:
            query = {"limit": str(LIST_PAGE_OBJECTS)}
            if label_selector:
                query["labelSelector"] = label_selector
            if token:
                query["continue"] = token
            page = await self._call("GET", resource, resource.path(namespace), query=query)
            yield page
            token = page["metadata"].get("continue") or ""
            if not token:
                return

    async def _patch(
        self,
        resource: Resource,
        path: str,
        body: Object,
        query: Mapping[str, str],
        content_type: str,
    ) -> Object:
        """A patch names no version, so a conflict is mostly a race within the server: it is tried
        once more at once, where a whole pass anew would meet the next one."""
        try:
            return await self._write("PATCH", resource, path, body, query, content_type)
        except ConflictError:
            return await self._write("PATCH", resource, path, body, query, content_type)

    async def _write(
        self,
        verb: str,
        resource: Resource,
        path: str,
        body: Object,
        query: Mapping[str, str],
        content_type: str = "application/json",
        *,
        limited: bool = True,
    ) -> Object:
        if not limited:
            return await self._call(verb, resource, path, body, query, content_type)
        self._refuse_while_patient(f"{verb} {path}")
        await self._writes.take()
        if self._fence is not None and not self._fence():
            # A process that was stopped and goes on must not write over its successor.
            words = "the lease is not held: another operator may act now"
            raise UnavailableError(0, "NotLeading", words, f"{verb} {path}")
        self.write_count += 1
        fenced = fence_of_request.set(self._fence)
        try:
            return await self._call(verb, resource, path, body, query, content_type)
        finally:
            fence_of_request.reset(fenced)

    async def _call(
        self,
        verb: str,
        resource: Resource,
        path: str,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        what = f"{verb} {path}"
        loop = asyncio.get_running_loop()
        begun = loop.time()
        status = 0
        try:
            status, headers, raw = await self._send(verb, path, body, query, content_type)
        except TooLateError as error:
            raise UnavailableError(0, "NotLeading", str(error), what) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            cause = str(error) or type(error).__name__
            raise UnavailableError(0, type(error).__name__, cause, what) from error
        finally:
            if self._observer is not None:
                self._observer.request(verb, resource.plural, status, loop.time() - begun)
        if status < 400:
            return dict(json.loads(raw))
        refusal = _error(status, raw, headers, what)
        if isinstance(refusal, UnavailableError) and refusal.retry_after_seconds is not None:
            wait = min(refusal.retry_after_seconds, PATIENCE_CAP_SECONDS)
            self._patient_until = max(self._patient_until, loop.time() + wait)
        raise refusal

    def _refuse_while_patient(self, what: str) -> None:
        wait = self._patient_until - asyncio.get_running_loop().time()
        if wait > 0:
            words = f"the API server asked for patience: nothing is written for {wait:.0f} s"
            error = UnavailableError(429, "TooManyRequests", words, what)
            error.retry_after_seconds = wait
            raise error

    async def _send(
        self,
        verb: str,
        path: str,
        body: Object | None,
        query: Mapping[str, str] | None,
        content_type: str,
    ) -> tuple[int, Mapping[str, str], bytes]:
        method, url, headers, payload, _ = await self._api.param_serialize(
            verb,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        response = await self._api.call_api(
            method, url, headers, payload, _request_timeout=self._timeout
        )
        return int(response.status), response.headers, await response.read()


def _error(status: int, raw: bytes, headers: Mapping[str, str], what: str) -> KubeError:
    try:
        answer: dict[str, Any] = json.loads(raw)
        reason, message = str(answer.get("reason") or ""), str(answer.get("message") or "")
    except (ValueError, AttributeError):
        reason, message = "", raw[:200].decode(errors="replace")
    kinds: dict[int, type[KubeError]] = {
        400: InvalidError,
        401: ForbiddenError,
        403: ForbiddenError,
        404: NotFoundError,
        409: ConflictError,
        422: InvalidError,
    }
    kind = kinds.get(status, UnavailableError if status == 429 or status >= 500 else KubeError)
    if status == 403 and TERMINATING in raw:
        kind = NotFoundError
    error = kind(status, reason, message, what)
    if isinstance(error, UnavailableError):
        wait = headers.get("Retry-After", "")
        error.retry_after_seconds = float(wait) if wait.isdigit() else None
    return error
