"""Progress and failure in words: each long step says what it does and how long it took."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_SECONDS = 0.05


class ClusterError(Exception):
    """Something the user can act on: the text names the object, the cause and the next step."""


def say(text: str) -> None:
    """Print to stderr: stdout belongs to what a command returns (a path, a kubectl answer)."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def step(text: str) -> Iterator[None]:
    """Announce a step on entry where someone watches, and its time in seconds when it is done."""
    started = time.monotonic()
    if sys.stderr.isatty():
        print(f"  ...    {text}", end="\r", file=sys.stderr, flush=True)
    yield
    say(f"  {time.monotonic() - started:5.1f} s  {text}")


def wait_until(
    condition: Callable[[], bool],
    what: str,
    timeout_seconds: float,
    still_possible: Callable[[], None] | None = None,
) -> None:
    """Poll `condition` until it holds.

    `still_possible` may raise early, for instance when the process waited for has died.
    Raises ClusterError naming `what` after `timeout_seconds`.
    """
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if still_possible is not None:
            still_possible()
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not so after {timeout_seconds:.0f} s")
        time.sleep(POLL_SECONDS)


def cache_dir() -> Path:
    """Folder for what is kept between runs: `$KVSCALER_CACHE_DIR`, else the XDG cache folder."""
    if explicit := os.environ.get("KVSCALER_CACHE_DIR"):
        return Path(explicit).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "kvscaler"
