"""What a decision remembers of the ones before: wants, the last answer, and lost signals.

All of it can be rebuilt after a restart at the price of patience: a fresh history begins with the
replicas that are there as its first want, so nothing shrinks before a full window has been seen.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Want:
    """What the constraints asked for at a time, before stabilization."""

    time: float
    replicas: int


@dataclass(frozen=True, slots=True)
class History:
    """Wants within the stabilization window (oldest first) and since when signals are lost."""

    started_at: float
    wants: tuple[Want, ...]
    last_desired: int
    signals_lost_at: float | None = None

    @classmethod
    def fresh(cls, now: float, replicas: int) -> "History":
        """History after a start, seeded with the replicas that are asked for now."""
        return cls(now, (Want(now, replicas),), replicas)

    def observe(self, now: float, replicas: int, window_seconds: float) -> "History":
        """This history with one more want, without what left the window.

        Only wants that no later and larger one covers are kept, so the length stays small: an
        older want with fewer replicas than a newer one can never be the maximum again.
        """
        kept = [w for w in self.wants if w.time > now - window_seconds and w.replicas > replicas]
        return replace(self, wants=(*kept, Want(now, replicas)))

    def not_after(self, now: float) -> "History":
        """This history without a time after `now` (Unix seconds).

        When the clock is set back, what was remembered lies in the future. It is counted from now:
        nothing shrinks for one more window, and nothing stands still until the old time returns.
        """
        latest = max([self.started_at, *(want.time for want in self.wants)])
        lost_at = self.signals_lost_at
        if latest <= now and (lost_at is None or lost_at <= now):
            return self
        return replace(
            self,
            started_at=min(self.started_at, now),
            wants=tuple(Want(min(want.time, now), want.replicas) for want in self.wants),
            signals_lost_at=None if lost_at is None else min(lost_at, now),
        )

    def highest_want(self) -> int:
        """The largest want within the window."""
        return max(want.replicas for want in self.wants)
