"""Successive counter readings of every replica, and the service's traffic window made from them.

Counters are cumulative per process; `started_at` tells a restart apart. What a process counted
before it was first seen belongs to the window only if it started while we were watching: after a
restart of the reader old counts are a baseline, while a new Pod's first reading is all news. What
a vanished Pod counted stays in the time in which it happened and leaves the window with it.

Memory: of the last minute every reading's time and arrivals are kept, but all of its counters only
once a bucket, as a row (see `counters`): enough to subtract at any later time.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvscaler.protocol.state import InFlight
from kvscaler.traffic import counters as arithmetic
from kvscaler.traffic.counters import Row
from kvscaler.traffic.cumulative import Cumulative, Span
from kvscaler.traffic.lengths import length_statistics
from kvscaler.traffic.samples import TrafficSample
from kvscaler.traffic.signal import AbsenceReason, Absent, Present, Signal, last_seen
from kvscaler.traffic.window import (
    BUCKET_SECONDS,
    LEVEL_SECONDS,
    RECENT_SECONDS,
    SHORT_SECONDS,
    WINDOW_SECONDS,
    Rate,
    TrafficWindow,
)

DENSE_SECONDS = 60.0
"""Age up to which every reading is kept; older ones are thinned to one per bucket."""
ENOUGH_FINISHED = 30
"""With fewer finished requests in the window, length statistics reach back to process starts."""
MAX_AGE_SECONDS = 20.0
"""Age at which a replica's last reading no longer speaks for it: four scrapes of 5 s."""

PRUNE_SECONDS = 5.0
"""Old readings do no harm, and looking for them at every window costs more than the window."""

MOST_READINGS = 1024
"""Of one replica. A window keeps far fewer, but nobody may ask for one for days."""


@dataclass(slots=True)
class _Reading:
    """What is kept of one sample. `row` and `in_flight` are always there on a replica's last one."""

    time: float
    started_at: float
    process_start: float | None
    arrivals: float
    refusals: float
    row: Row | None
    in_flight: InFlight | None
    anchor: bool
    """Whether it stays when it is older than `DENSE_SECONDS`, and with it its row."""


Count = Callable[[_Reading], float]


class SampleHistory:
    """Readings of one service's replicas over a little more than a traffic window."""

    def __init__(self) -> None:
        self._readings: dict[str, list[_Reading]] = {}
        self._watching_since: float | None = None
        self._pruned_at = float("-inf")

    def observe(self, sample: TrafficSample) -> Signal[TrafficSample]:
        """Take a reading, from either path. Gives the reason when it is not taken.

        A reading older than the last one, or of a process that another one followed, is stale (the
        slower of two paths). One whose counters ran back within a process is mismatched: about
        another process than it says. When they stay there until nothing that was taken is fresh
        any more, they are a new baseline: else a single wrong number would be the last one taken.

        Only equality of `started_at` counts, never its order: a container that starts again on a
        node whose clock was corrected is younger than it says.
        """
        if self._watching_since is None:
            self._watching_since = sample.time
        kept = self._readings.get(sample.pod_uid)
        last = kept[-1] if kept else None
        same = last is not None and sample.started_at == last.started_at
        followed = not same and any(r.started_at == sample.started_at for r in kept or ())
        if last is not None and (sample.time <= last.time or followed):
            return Absent(AbsenceReason.STALE, sample.source, "older than the last", last.time)
        try:
            row = Row.of(sample.counters)
        except ValueError as error:
            return Absent(AbsenceReason.MISMATCHED, sample.source, str(error))
        start = sample.process_start
        if last is not None and same and arithmetic.ran_back(row, _row(last)):
            if sample.time - last.time <= MAX_AGE_SECONDS:
                return Absent(
                    AbsenceReason.MISMATCHED,
                    sample.source,
                    f"counters of Pod {sample.pod_uid} ran back without a restart",
                    last.time,
                )
            kept = last = start = None
        if kept is None:
            kept = self._readings[sample.pod_uid] = []
        if last is not None:
            # The end of a process stays whole, as nothing later holds what it counted, and so does
            # the last reading before a gap.
            gap = sample.time - last.time >= BUCKET_SECONDS
            last.anchor = not same or gap or _is_spaced(kept)
            last.in_flight = None
            if not last.anchor:
                last.row = None
        kept.append(
            _Reading(
                sample.time,
                sample.started_at,
                start,
                arithmetic.demand_arrivals(sample.counters),
                arithmetic.capacity_refusals(sample.counters),
                row,
                sample.in_flight,
                anchor=False,
            )
        )
        if len(kept) > MOST_READINGS:
            self._prune(sample.time)
        return Present(sample, sample.source, sample.time)

    def _prune(self, now: float) -> None:
        """Thin old readings and drop those that no window reaches, vanished replicas with them."""
        self._pruned_at = now
        horizon = now - WINDOW_SECONDS - BUCKET_SECONDS
        dense = now - DENSE_SECONDS
        for uid, readings in list(self._readings.items()):
            if readings[-1].time < horizon:
                del self._readings[uid]
                continue
            kept = [
                reading
                for reading, following in pairwise(readings)
                if (reading.anchor or reading.time >= dense) and following.time >= horizon
            ]
            self._readings[uid] = [*kept, readings[-1]]

    def last_seen(self, pod_uid: str) -> float | None:
        """Time of a replica's last reading."""
        readings = self._readings.get(pod_uid)
        return readings[-1].time if readings else None

    def window(
        self, now: float, expected: Collection[str], max_age_seconds: float = MAX_AGE_SECONDS
    ) -> Signal[TrafficWindow]:
        """Traffic of the service; `expected` are the UIDs of the replicas that should report."""
        if not self._pruned_at <= now < self._pruned_at + PRUNE_SECONDS:
            self._prune(now)
        source = "replicas"
        if not expected:
            return Absent(AbsenceReason.MISSING, source, "no ready replica")
        last = {uid: seen for uid in expected if (seen := self.last_seen(uid)) is not None}
        if not last:
            return Absent(AbsenceReason.MISSING, source, "no ready replica has reported")
        fresh = {uid: seen for uid, seen in last.items() if abs(now - seen) <= max_age_seconds}
        if not fresh:
            newest = max(last.values())
            return Absent(AbsenceReason.STALE, source, last_seen(newest, now), newest)
        time = min(fresh.values())
        return Present(self._window(now, len(fresh) / len(expected), time, fresh), source, time)

    def _window(
        self, now: float, coverage: float, time: float, fresh: Collection[str]
    ) -> TrafficWindow:
        upto = max(readings[-1].time for readings in self._readings.values())
        watching = upto if self._watching_since is None else self._watching_since
        since = max(watching, now - WINDOW_SECONDS)
        arrivals = Cumulative(self._spans(lambda reading: reading.arrivals, since))
        refusals = Cumulative(self._spans(lambda reading: reading.refusals, upto - LEVEL_SECONDS))
        short, level = max(since, upto - SHORT_SECONDS), max(since, upto - LEVEL_SECONDS)
        sums = arithmetic.summed(self._increases(now - WINDOW_SECONDS))
        lengths = sums
        if sums.finished < ENOUGH_FINISHED:
            lengths = arithmetic.summed(_row(r[-1]) for r in self._readings.values())
        return TrafficWindow(
            time=time,
            coverage=coverage,
            covered_seconds=max(0.0, upto - since),
            arrivals_short=_rate(arrivals, short, upto),
            arrivals_level=_rate(arrivals, level, upto),
            arrivals_recent=tuple(
                _rate(arrivals, max(since, upto - seconds), upto) for seconds in RECENT_SECONDS
            ),
            arrival_buckets=_buckets(arrivals, since, upto),
            arrival_prompt_mean_tokens=_mean(sums.arrival_prompt_tokens, sums.arrivals),
            arrival_max_tokens_mean=_mean(sums.arrival_max_tokens, sums.arrivals),
            lengths=length_statistics(lengths, self._in_flight(fresh)),
            refused_short=_rate(refusals, short, upto),
            refused_level=_rate(refusals, level, upto),
            refused=sums.refused,
            admitted=sums.admitted,
            finished=sums.finished,
            cancelled=sums.cancelled,
            failed=sums.failed,
            preemptions=sums.preemptions,
            prefix_hit_share=_mean(sums.prefix_hit_tokens, sums.prefix_queried_tokens),
            time_to_first_token=sums.time_to_first_token,
            time_per_output_token=sums.time_per_output_token,
            queue_wait=sums.queue_wait,
        )

    def _in_flight(self, fresh: Collection[str]) -> InFlight:
        reports = [
            in_flight
            for uid in fresh
            if (in_flight := self._readings[uid][-1].in_flight) is not None
        ]
        return InFlight(
            requests=sum(r.requests for r in reports),
            prompt_tokens=sum(r.prompt_tokens for r in reports),
            generated_tokens=sum(r.generated_tokens for r in reports),
            generated_tokens_squared=sum(r.generated_tokens_squared for r in reports),
        )

    def _watched_start(self, reading: _Reading) -> float | None:
        """Start of the reading's process if it began while we were watching."""
        watching = self._watching_since
        start = reading.process_start
        return start if watching is not None and start is not None and start >= watching else None

    def _spans(self, count: Count, since: float) -> Iterator[list[Span]]:
        """For each replica, spans that reach beyond `since`: counts between successive readings."""
        for readings in self._readings.values():
            spans: list[Span] = []
            first = readings[0]
            start = self._watched_start(first)
            if start is not None and first.time > since:
                spans.append((start, first.time, count(first)))
            reach = bisect_right(readings, since, key=lambda reading: reading.time)
            for earlier, later in pairwise(readings[max(0, reach - 1) :]):
                if earlier.started_at == later.started_at:
                    counted = count(later) - count(earlier)
                    spans.append((earlier.time, later.time, max(0.0, counted)))
                else:
                    start = earlier.time if later.process_start is None else later.process_start
                    began = min(later.time, max(earlier.time, start))
                    spans.append((began, later.time, count(later)))
            yield spans

    def _increases(self, since: float) -> Iterator[Row]:
        """What each process counted after `since`, as far as it was watched."""
        for readings in self._readings.values():
            whole = [reading for reading in readings if reading.row is not None]
            first = whole[0]
            news = self._watched_start(first) is not None and first.time > since
            base = None if news else first.row
            for earlier, later in pairwise(whole):
                if earlier.started_at != later.started_at:
                    if earlier.time > since:
                        yield arithmetic.increase(_row(earlier), base)
                    base = None
                if later.time <= since:
                    base = later.row
            yield arithmetic.increase(_row(readings[-1]), base)


def _row(reading: _Reading) -> Row:
    assert reading.row is not None
    return reading.row


def _is_spaced(readings: Sequence[_Reading]) -> bool:
    """Whether the last reading is a bucket away from the one before it that stays."""
    last = readings[-1]
    for reading in reversed(readings[:-1]):
        if reading.anchor:
            return last.time - reading.time >= BUCKET_SECONDS
    return True


def _rate(counted: Cumulative, start: float, end: float) -> Rate:
    """Events between two times, each span's count being spread evenly over it."""
    return Rate(counted.between(start, end), max(0.0, end - start))


def _buckets(counted: Cumulative, since: float, upto: float) -> tuple[Rate, ...]:
    """Complete buckets that end at `upto`, oldest first."""
    complete = int((upto - since) // BUCKET_SECONDS)
    bounds = [upto - index * BUCKET_SECONDS for index in range(complete, -1, -1)]
    return tuple(Rate(counted.between(a, b), BUCKET_SECONDS) for a, b in pairwise(bounds))


def _mean(total: float, count: float) -> float | None:
    return total / count if count > 0 else None
