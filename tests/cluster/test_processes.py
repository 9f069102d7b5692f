"""Ending a cluster's processes."""

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from localcluster import processes

LISTEN = """
import socket, sys, threading, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
held = bytearray(300 << 20)  # memory that takes the kernel a while to give back
held[::4096] = b"x" * len(held[::4096])
for _ in range(8):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("listening", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def listening(state: Path, port: int) -> Iterator[Path]:
    """A process of the cluster `state` that listens on `port`; gives its executable."""
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN, str(port)],
        env={processes.MARKER: str(state)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        try:
            yield Path(sys.executable)
        finally:
            process.kill()


@pytest.mark.parametrize(
    "end",
    [
        lambda state, executable: processes.end(state, executable, signal.SIGKILL),
        lambda state, _executable: processes.end_all(state),
    ],
    ids=["end", "end_all"],
)
def test_the_port_of_a_killed_process_is_free_once_it_has_ended(
    tmp_path: Path, end: Callable[[Path, Path], None]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for _ in range(3):
        with listening(tmp_path, port) as executable:
            end(tmp_path, executable)
            socket.create_server(("127.0.0.1", port)).close()
            assert processes.running(tmp_path) == {}


def test_ending_what_does_not_run_is_no_error(tmp_path: Path) -> None:
    processes.end(tmp_path, Path(sys.executable))
    processes.end_all(tmp_path)
