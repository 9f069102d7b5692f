"""A periodic LIST of every watched kind, compared with the caches.

Kopf does not notice objects that vanished while its watch was cut: after the relist that follows a
410 it reports what exists and never what is gone. A replica that no longer exists would count
for ever. The comparison also tells when a watch has gone deaf: it then finds news that no event
brought, again and again, and liveness fails.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvscaler_operator.cache import ObjectCache, version_of
from kvscaler_operator.gateways.kube import KubeError, KubeGateway, Listing
from kvscaler_operator.patience import patiently
from kvscaler_operator.resources import Object, Resource, uid_of

logger = logging.getLogger(__name__)

Changed = Callable[[Resource, Object], None]
Suspect = tuple[Object, int | None]
"""An object that the cache does not know as it is; the version at which it was gone, if it is."""


class Relist:
    """Lists all kinds once per period, and reports each difference as if it were an event."""

    def __init__(
        self,
        kube: KubeGateway,
        caches: Mapping[Resource, ObjectCache],
        selectors: Mapping[Resource, str],
        namespaces: Sequence[str],
        changed: Changed,
        *,
        settle_seconds: float = 5.0,
        took: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._kube = kube
        self._caches = caches
        self._selectors = selectors
        self._scopes: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._changed = changed
        self._settle = settle_seconds
        self._took = took
        self._agreed_at: dict[Resource, float] = {}
        self.passes = 0
        """Complete passes over all kinds without an error."""

    def watch_age_seconds(self) -> float:
        """How long ago the laggard of all watches was last known to be up to date."""
        now = asyncio.get_running_loop().time()
        return max((now - at for at in self._agreed_at.values()), default=0.0)

    def start_clock(self) -> None:
        """Count the ages of all watches from now."""
        now = asyncio.get_running_loop().time()
        self._agreed_at = dict.fromkeys(self._caches, now)

    async def fill(self) -> None:
        """Fill empty caches by one list of every kind, and try again while the server is away.

        Raises `KubeError` for what no patience heals, as a missing right.
        """
        for resource, cache in self._caches.items():
            for scope in self._scopes:
                what = f"The first list of {resource.plural}"
                for obj in (await patiently(what, partial(self._list, resource, scope))).items:
                    if cache.observe(_typed(obj, resource)):
                        self._changed(resource, obj)
        self.start_clock()

    async def run(self, period_seconds: float) -> None:
        """Pass after pass, until cancelled."""
        while True:
            await asyncio.sleep(period_seconds)
            await self.run_once()

    async def run_once(self) -> int:
        """One pass; returns the number of differences that no event had brought."""
        begun = asyncio.get_running_loop().time()
        suspects: dict[Resource, list[Suspect]] = {}
        for resource in self._caches:
            try:
                suspects[resource] = [
                    s for scope in self._scopes for s in await self._differences(resource, scope)
                ]
            except KubeError as error:
                logger.warning(
                    "Relist of %s failed, next try in a period: %s", resource.plural, error
                )
        if any(suspects.values()):
            # An event may be on its way. Only what is still unknown after a while was missed.
            await asyncio.sleep(self._settle)
        found = sum(self._settled(resource, news) for resource, news in suspects.items())
        if len(suspects) == len(self._caches):
            self.passes += 1
        self._took(asyncio.get_running_loop().time() - begun)
        return found

    def _settled(self, resource: Resource, suspects: list[Suspect]) -> int:
        missed = sum(self._take_in(resource, obj, gone_at) for obj, gone_at in suspects)
        if missed:
            logger.info("Relist of %s found %d changes without an event", resource.plural, missed)
        else:
            self._agreed_at[resource] = asyncio.get_running_loop().time()
        return missed

    async def _differences(self, resource: Resource, scope: str | None) -> list[Suspect]:
        listing = await self._list(resource, scope)
        cache = self._caches[resource]
        listed = {uid_of(obj) for obj in listing.items}
        news: list[Suspect] = [
            (obj, None)
            for obj in listing.items
            if (known := cache.by_uid(uid_of(obj))) is None or version_of(known) < version_of(obj)
        ]
        news += [
            (obj, listing.resource_version)
            for obj in cache.all()
            if (scope is None or obj["metadata"].get("namespace") == scope)
            and uid_of(obj) not in listed
            and version_of(obj) <= listing.resource_version
        ]
        return news

    async def _list(self, resource: Resource, scope: str | None) -> Listing:
        return await self._kube.list(resource, scope, self._selectors.get(resource, ""))

    def _take_in(self, resource: Resource, obj: Object, gone_at: int | None) -> int:
        cache = self._caches[resource]
        if gone_at is None:
            changed = cache.observe(_typed(obj, resource))
        else:
            changed = cache.remove(uid_of(obj), gone_at) is not None
        if changed:
            self._changed(resource, obj)
        return int(changed)


def _typed(obj: Object, resource: Resource) -> Object:
    """Items of a list come without their kind."""
    obj.setdefault("apiVersion", resource.api_version)
    obj.setdefault("kind", resource.kind)
    return obj
