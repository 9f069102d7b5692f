"""The arrival rate that sizing uses: the level, or a step up as soon as counts prove one.

A step is searched for in several recent windows at once. With n arrivals in all and a share p of
the time, a window of an unchanged stream holds Binomial(n, p) of them: exact for any rate, and the
doubt about the time before is in it (Przyborowski and Wilenski 1940). A window is believed only
when that many or more would come with `STEP_PROBABILITY`, which allows for all the windows and for
a look every second.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from kvscaler.traffic.window import LEVEL_SECONDS, SHORT_SECONDS, Rate

STEP_PROBABILITY = 1e-4
"""Chance of a false step in one window at one look."""
BELIEVED_SIGMAS = 1.0
"""Standard errors by which a step's believed rate stays below what its window shows, and above
which of the last 12 s it never goes: a burst of a second asks for little."""
MIN_RATE_SECONDS = 10.0
"""Arrivals over less than this are no rate yet."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The arrival rate that sizing uses, requests per second, and which window it is from."""

    per_second: float
    window_seconds: float
    step: bool


def arrivals(level: Rate, short: Rate, *recent: Rate) -> Arrivals | None:
    """Level over 45 s, or the largest step that a recent window proves; `None` before any rate.

    `short` (12 s) is one of the windows, `recent` are the others. When any of them proves that the
    rate stepped up, it did so where that is most likely, and not in the shortest burst that stands
    out; from there on, a second step has to be proved anew. A level that is not yet watched for
    45 s is reduced by a part of its standard error.
    """
    if level.seconds < MIN_RATE_SECONDS:
        return None
    doubt = math.sqrt(level.count) * (1.0 - min(1.0, level.seconds / LEVEL_SECONDS))
    best = Arrivals((level.count - doubt) / level.seconds, level.seconds, step=False)
    windows = [w for w in (short, *recent) if level.seconds - w.seconds >= MIN_RATE_SECONDS]
    enclosing = level
    while windows := [w for w in windows if w.seconds < enclosing.seconds]:
        if not any(_chance(window, enclosing) <= STEP_PROBABILITY for window in windows):
            break
        enclosing = max(windows, key=lambda window: _likelihood(window, enclosing))
        believed = min(lowest_rate(enclosing), highest_rate(short, BELIEVED_SIGMAS))
        if believed > best.per_second:
            best = Arrivals(believed, enclosing.seconds, step=True)
    return best


def _likelihood(window: Rate, enclosing: Rate) -> float:
    """Logarithm of the likelihood that the rate changed once, where `window` begins, but for a term
    that all windows share."""
    before = Rate(max(0.0, enclosing.count - window.count), enclosing.seconds - window.seconds)
    return sum(r.count * math.log(r.per_second) for r in (window, before) if r.count > 0)


def lowest_rate(window: Rate) -> float:
    """Rate that the counts of a window prove, requests per second.

    There are 12/s windows of s seconds in 12 s and the best of them is looked for, so each is given
    only s/12 of the error that 12 s have: an exact Poisson bound (Wilson and Hilferty's form).
    """
    if window.count < 1 or window.seconds <= 0:
        return 0.0
    error = NormalDist().cdf(-BELIEVED_SIGMAS) * min(1.0, window.seconds / SHORT_SECONDS)
    sigmas = NormalDist().inv_cdf(1.0 - error)
    k = window.count
    root = 1.0 - 1.0 / (9.0 * k) - sigmas / (3.0 * math.sqrt(k))
    return k * max(0.0, root) ** 3 / window.seconds


def highest_rate(window: Rate, sigmas: float) -> float:
    """Rate that the counts of a window allow, requests per second."""
    return (window.count + sigmas * (math.sqrt(window.count) + 1.0)) / window.seconds


def _chance(window: Rate, enclosing: Rate) -> float:
    """Chance that the end of an unchanged longer window holds as many as it does, or more."""
    share = window.seconds / enclosing.seconds
    # A count that is split between two looks is a fraction; the whole part is certain.
    count = int(window.count)
    return tail_probability(count, max(count, int(enclosing.count)), share)


def tail_probability(least: int, trials: int, share: float) -> float:
    """P(Binomial(trials, share) >= least), summed from its first term; 1 at or below the mean."""
    if least <= trials * share:
        return 1.0
    if least > trials:
        return 0.0
    term = math.exp(
        math.lgamma(trials + 1)
        - math.lgamma(least + 1)
        - math.lgamma(trials - least + 1)
        + least * math.log(share)
        + (trials - least) * math.log1p(-share)
    )
    total, odds = term, share / (1.0 - share)
    for k in range(least, trials):
        term *= (trials - k) / (k + 1) * odds
        total += term
        if term < 1e-6 * total:
            break
    return min(1.0, total)
