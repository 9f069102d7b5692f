"""Start, find and end the processes of a cluster, without process-id files that can go stale.

Each process carries the cluster's state folder in its environment, so that what runs is found by
looking at /proc: true after a crash, a kill -9 or a reboot, and never somebody else's process.
"""

import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from localcluster.steps import ClusterError, wait_until

MARKER = "KVSCALER_CLUSTER_STATE"
LOG_TAIL_LINES = 15
LOG_LINE_CHARACTERS = 1000
START_TIMEOUT_SECONDS = 30
_attached: list[subprocess.Popen[bytes]] = []


def running(state: Path) -> dict[int, Path]:
    """Processes marked with `state`, by process id, each with its executable. Zombies left out."""
    mark = f"{MARKER}={state}".encode()
    found: dict[int, Path] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with suppress(OSError):  # it ended meanwhile, or is another user's: not one of ours
            # A zombie has no environment left, so the first test excludes it.
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                executable = str((entry / "exe").readlink()).removesuffix(" (deleted)")
                found[int(entry.name)] = Path(executable)
    return found


def find(state: Path, executable: Path) -> int | None:
    """The process of this cluster that runs `executable`, or None."""
    real = executable.resolve()
    return next((pid for pid, path in running(state).items() if path == real), None)


def start(
    state: Path,
    argv: Sequence[str | Path],
    log: Path,
    enter: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    attached: bool = False,
) -> None:
    """Start `argv`, appending both outputs to `log`; returns once it runs.

    `enter` is a command prefix that moves it into a sandbox. It outlives this process unless
    `attached`: then it is killed when this process ends, however that happens.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    whole_environment = {"PATH": os.environ["PATH"], **(environment or {}), MARKER: str(state)}
    with log.open("ab") as output:
        if attached:
            _attached.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *argv],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd="/",
                    env=whole_environment,
                    start_new_session=True,
                )
            )
        else:
            # setsid --fork orphans it: its parent becomes the process 1 of its own namespace,
            # which reaps it.
            subprocess.run(
                [*enter, "setsid", "--fork", *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env=whole_environment,
                check=True,
            )
    executable = Path(argv[0])
    try:
        wait_until(
            lambda: find(state, executable) is not None,
            f"{executable.name} has started",
            START_TIMEOUT_SECONDS,
        )
    except ClusterError as error:
        raise died(executable, log) from error


def died(executable: Path, log: Path) -> ClusterError:
    """The error for a component that ended by itself, with the last words of its log."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    tail = "\n".join(f"    {line[:LOG_LINE_CHARACTERS]}" for line in lines[-LOG_TAIL_LINES:])
    return ClusterError(f"{executable.name} ended by itself; the end of {log}:\n{tail}")


def end(
    state: Path,
    executable: Path,
    how: signal.Signals = signal.SIGTERM,
    timeout_seconds: float = 10,
) -> None:
    """Signal the cluster's process of `executable`, and wait until it has ended."""
    pid = find(state, executable)
    if pid is None:
        return
    with _handle(pid) as ended:
        with suppress(ProcessLookupError):
            os.kill(pid, how)
        wait_until(ended, f"{executable.name} has ended", timeout_seconds)


def end_all(state: Path, timeout_seconds: float = 10) -> None:
    """Kill every process of the cluster and wait until the last one has gone."""
    with ExitStack() as handles:
        watched: dict[int, Callable[[], bool]] = {}

        def all_gone() -> bool:
            left = running(state)
            for pid in left:
                if pid not in watched:
                    watched[pid] = handles.enter_context(_handle(pid))
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _attached[:] = [child for child in _attached if child.poll() is None]  # reaps them
            return not left and all(ended() for ended in watched.values())

        wait_until(all_gone, f"the processes of {state} have ended", timeout_seconds)


@contextmanager
def _handle(pid: int) -> Iterator[Callable[[], bool]]:
    """Whether process `pid` has ended with all that it held, asked of the kernel.

    /proc forgets a killed process (its environment first) some time before its last thread has
    closed its sockets; who starts a successor at once would find the port still in use.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        yield lambda: True
        return
    try:
        yield lambda: bool(select.select([handle], [], [], 0)[0])
    finally:
        os.close(handle)
