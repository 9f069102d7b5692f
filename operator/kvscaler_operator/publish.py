"""Saying what a pass found: metrics always, status when the pacer lets it, a log line for news."""

import logging
from collections.abc import Callable
from datetime import UTC, datetime

from kvscaler_api.conditions import ConditionType, find_condition
from kvscaler_api.metadata import PAUSED_ANNOTATION
from kvscaler_api.reasons import Reason

from kvscaler_operator import conditions as verdict
from kvscaler_operator import stored
from kvscaler_operator.cache import Key, ObjectCache
from kvscaler_operator.conditions import Verdict
from kvscaler_operator.gateways.kube import NotFoundError
from kvscaler_operator.memory import ServiceMemory
from kvscaler_operator.metrics import ServiceMetrics
from kvscaler_operator.report import Report
from kvscaler_operator.resources import INFERENCE_SERVICES, name_of, namespace_of, uid_of
from kvscaler_operator.writers import Writers

logger = logging.getLogger(__name__)

GONE_SECONDS = 1.0
"""When to look again for an object that was not there to be written."""


class Publisher:
    """Publishes reports."""

    def __init__(
        self,
        writers: Writers,
        services: ObjectCache,
        metrics: ServiceMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._writers = writers
        self._services = services
        self._metrics = metrics
        self._clock = clock

    async def publish(self, report: Report, memory: ServiceMemory) -> float | None:
        """Set metrics, and write status if it is time; returns seconds until it will be."""
        paused = stored.paused(report.obj)
        replicas = self._writers.scales.replicas(report.obj)
        self._metrics.publish(report, replicas, paused=paused)
        return await self._write(report, memory)

    async def show_pause(self, report: Report, memory: ServiceMemory) -> None:
        """The one write that a paused service gets: the one that shows the pause."""
        replicas = self._writers.scales.replicas(report.obj)
        counts = verdict.ready(report.fleet, replicas, 1)
        words = f"annotation {PAUSED_ANNOTATION} stops all writes; {counts.message}"
        report.say(ConditionType.READY, Verdict(counts.status, Reason.PAUSED, words))
        report.say(ConditionType.SCALING_ACTIVE, Verdict(False, Reason.PAUSED, words))
        self._metrics.publish(report, replicas, paused=True)
        known = find_condition(report.before.conditions, ConditionType.SCALING_ACTIVE)
        if not memory.pause_shown and (known is None or known.reason != Reason.PAUSED):
            await self._write(report, memory)
        memory.pause_shown = True

    def forget(self, key: Key) -> None:
        """Drop the metrics of a service that is gone."""
        self._metrics.forget(*key)

    async def _write(self, report: Report, memory: ServiceMemory) -> float | None:
        status = report.status(datetime.fromtimestamp(self._clock(), UTC)).to_wire()
        wait = memory.pacer.wait_seconds(report.before_wire, status, quiet=report.quiet)
        if wait != 0.0:
            return wait
        document = {
            "apiVersion": INFERENCE_SERVICES.api_version,
            "kind": INFERENCE_SERVICES.kind,
            "metadata": {
                "name": name_of(report.obj),
                "namespace": namespace_of(report.obj),
                "uid": uid_of(report.obj),
            },
            "status": status,
        }
        try:
            written = await self._writers.kube.apply(
                INFERENCE_SERVICES, document, subresource="status"
            )
        except NotFoundError as error:
            # Deleted meanwhile: its event is on the way, and nobody is left to tell.
            logger.info("%s/%s: %s", namespace_of(report.obj), name_of(report.obj), error)
            return GONE_SECONDS
        self._services.observe(written)
        self._log_news(report)
        return None

    def _log_news(self, report: Report) -> None:
        where = f"{namespace_of(report.obj)}/{name_of(report.obj)}"
        for kind, now in report.verdicts.items():
            before = find_condition(report.before.conditions, kind)
            if before is None or before.reason != now.reason:
                logger.info("%s: %s is %s: %s", where, kind.value, now.reason.value, now.message)
        decision, last = report.decision, report.before.decision
        if decision is not None and (
            last is None or last.desired_replicas != decision.desired_replicas
        ):
            logger.info(
                "%s: %d replicas wanted (%s): %s",
                where,
                decision.desired_replicas,
                decision.binding_constraint.value,
                decision.message,
            )
