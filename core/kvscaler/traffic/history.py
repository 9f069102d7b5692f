"""Successive counter readings of every replica, and the service's traffic window made from them.

Counters are cumulative per process; `started_at` tells a restart apart. What a process counted
before it was first seen belongs to the window only if it started while we were watching: after a
restart of the reader old counts are a baseline, while a new Pod's first reading is all news. What
a vanished Pod counted stays in the time in which it happened and leaves the window with it.
"""

from collections.abc import Callable, Collection, Iterator
from itertools import pairwise

from kvscaler.protocol.state import InFlight, TrafficCounters
from kvscaler.traffic import counters as arithmetic
from kvscaler.traffic.lengths import length_statistics
from kvscaler.traffic.samples import TrafficSample
from kvscaler.traffic.signal import AbsenceReason, Absent, Present, Signal
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

MOST_READINGS = 1024
"""Of one replica. A window keeps far fewer, but nobody may ask for one for days."""

Reading = Callable[[TrafficCounters], float]
Span = tuple[float, float, float]
"""From, to (Unix seconds) and the events counted in between."""


class SampleHistory:
    """Readings of one service's replicas over a little more than a traffic window."""

    def __init__(self) -> None:
        self._samples: dict[str, list[TrafficSample]] = {}
        self._watching_since: float | None = None

    def observe(self, sample: TrafficSample) -> Signal[TrafficSample]:
        """Take a reading, from either path. Gives the reason when it is not taken.

        A reading older than the last one is stale (the slower of two paths), one whose counters
        ran back within a process is mismatched: about another process than it says.
        """
        if self._watching_since is None:
            self._watching_since = sample.time
        kept = self._samples.setdefault(sample.pod_uid, [])
        if kept:
            last = kept[-1]
            if sample.time <= last.time or sample.started_at < last.started_at:
                return Absent(AbsenceReason.STALE, sample.source, "older than the last", last.time)
            same = sample.started_at == last.started_at
            if same and arithmetic.ran_back(sample.counters, last.counters):
                return Absent(
                    AbsenceReason.MISMATCHED,
                    sample.source,
                    f"counters of Pod {sample.pod_uid} ran back without a restart",
                    last.time,
                )
        kept.append(sample)
        if len(kept) > MOST_READINGS:
            self.prune(sample.time)
        return Present(sample, sample.source, sample.time)

    def prune(self, now: float) -> None:
        """Thin old readings and drop those that no window reaches, vanished replicas with them."""
        horizon = now - WINDOW_SECONDS - BUCKET_SECONDS
        for uid, samples in list(self._samples.items()):
            if samples[-1].time < horizon:
                del self._samples[uid]
                continue
            kept: list[TrafficSample] = []
            for sample, following in pairwise(samples):
                restart = following.started_at != sample.started_at
                spaced = not kept or sample.time - kept[-1].time >= BUCKET_SECONDS
                dense = sample.time >= now - DENSE_SECONDS
                if following.time >= horizon and (restart or spaced or dense):
                    kept.append(sample)
            self._samples[uid] = [*kept, samples[-1]]

    def last_seen(self, pod_uid: str) -> float | None:
        """Time of a replica's last reading."""
        samples = self._samples.get(pod_uid)
        return samples[-1].time if samples else None

    def window(
        self, now: float, expected: Collection[str], max_age_seconds: float = MAX_AGE_SECONDS
    ) -> Signal[TrafficWindow]:
        """Traffic of the service; `expected` are the UIDs of the replicas that should report."""
        self.prune(now)
        source = "replicas"
        if not expected:
            return Absent(AbsenceReason.MISSING, source, "no ready replica")
        last = {uid: seen for uid in expected if (seen := self.last_seen(uid)) is not None}
        if not last:
            return Absent(AbsenceReason.MISSING, source, "no ready replica has reported")
        fresh = {uid: seen for uid, seen in last.items() if now - seen <= max_age_seconds}
        if not fresh:
            newest = max(last.values())
            return Absent(AbsenceReason.STALE, source, f"{now - newest:.0f} s old", newest)
        time = min(fresh.values())
        return Present(self._window(now, len(fresh) / len(expected), time, fresh), source, time)

    def _window(
        self, now: float, coverage: float, time: float, fresh: Collection[str]
    ) -> TrafficWindow:
        upto = max(samples[-1].time for samples in self._samples.values())
        watching = upto if self._watching_since is None else self._watching_since
        since = max(watching, now - WINDOW_SECONDS)
        arrivals = list(self._spans(arithmetic.demand_arrivals, since))
        refusals = list(self._spans(arithmetic.capacity_refusals, upto - LEVEL_SECONDS))
        short, level = max(since, upto - SHORT_SECONDS), max(since, upto - LEVEL_SECONDS)
        sums = arithmetic.summed(self._increases(now - WINDOW_SECONDS))
        lengths = sums
        if sums.finished < ENOUGH_FINISHED:
            lengths = arithmetic.summed(s[-1].counters for s in self._samples.values())
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
        reports = [self._samples[uid][-1].in_flight for uid in fresh]
        return InFlight(
            requests=sum(r.requests for r in reports),
            prompt_tokens=sum(r.prompt_tokens for r in reports),
            generated_tokens=sum(r.generated_tokens for r in reports),
            generated_tokens_squared=sum(r.generated_tokens_squared for r in reports),
        )

    def _watched_start(self, sample: TrafficSample) -> float | None:
        """Start of the sample's process if it began while we were watching."""
        watching = self._watching_since
        start = sample.process_start
        return start if watching is not None and start >= watching else None

    def _spans(self, reading: Reading, since: float) -> Iterator[Span]:
        """Spans of all replicas that reach beyond `since`: counts between successive readings."""
        for samples in self._samples.values():
            start = self._watched_start(samples[0])
            if start is not None and samples[0].time > since:
                yield start, samples[0].time, reading(samples[0].counters)
            for earlier, later in pairwise(samples):
                if later.time <= since:
                    continue
                if earlier.started_at == later.started_at:
                    count = reading(later.counters) - reading(earlier.counters)
                    yield earlier.time, later.time, max(0.0, count)
                else:
                    began = min(later.time, max(earlier.time, later.process_start))
                    yield began, later.time, reading(later.counters)

    def _increases(self, since: float) -> Iterator[TrafficCounters]:
        """What each process counted after `since`, as far as it was watched."""
        for samples in self._samples.values():
            first = samples[0]
            news = self._watched_start(first) is not None and first.time > since
            base = None if news else first.counters
            for earlier, later in pairwise(samples):
                if earlier.started_at != later.started_at:
                    if earlier.time > since:
                        yield arithmetic.increase(earlier.counters, base)
                    base = None
                if later.time <= since:
                    base = later.counters
            yield arithmetic.increase(samples[-1].counters, base)


def _rate(spans: list[Span], start: float, end: float) -> Rate:
    """Events between two times, each span's count being spread evenly over it."""
    count = sum(n * _overlap(a, b, start, end) for a, b, n in spans)
    return Rate(count, max(0.0, end - start))


def _overlap(a: float, b: float, start: float, end: float) -> float:
    """Share of the span from `a` to `b` that lies between `start` and `end`."""
    if b <= a:
        return 1.0 if start < b <= end else 0.0
    return max(0.0, min(b, end) - max(a, start)) / (b - a)


def _buckets(spans: list[Span], since: float, upto: float) -> tuple[Rate, ...]:
    """Complete buckets that end at `upto`, oldest first, in one pass over the spans."""
    complete = int((upto - since) // BUCKET_SECONDS)
    first = upto - complete * BUCKET_SECONDS
    counts = [0.0] * complete
    for a, b, n in spans:
        low = max(0, int((a - first) // BUCKET_SECONDS))
        high = min(complete - 1, int((b - first) // BUCKET_SECONDS))
        for index in range(low, high + 1):
            start = first + index * BUCKET_SECONDS
            counts[index] += n * _overlap(a, b, start, start + BUCKET_SECONDS)
    return tuple(Rate(count, BUCKET_SECONDS) for count in counts)


def _mean(total: float, count: float) -> float | None:
    return total / count if count > 0 else None
