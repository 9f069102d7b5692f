"""A replica in a cgroup of its own, with the memory limit that a Pod would have.

The kernel counts everything that a container is charged for: the process, its page cache, and what
sockets hold. Needs root; both versions of the cgroup interface are understood.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bytes as replicas

ROOT = Path("/sys/fs/cgroup")


class NoCage(Exception):
    """This machine lets us make no cgroup; says why."""


class Cage:
    """A cgroup with a memory limit."""

    def __init__(self, limit_bytes: int) -> None:
        self._v1 = (ROOT / "memory" / "memory.limit_in_bytes").exists()
        parent = ROOT / "memory" if self._v1 else ROOT
        self.path = parent / f"kvscaler-bench-{os.getpid()}"
        limit = "memory.limit_in_bytes" if self._v1 else "memory.max"
        try:
            self.path.mkdir()
            (self.path / limit).write_text(str(limit_bytes))
            swap = "memory.memsw.limit_in_bytes" if self._v1 else "memory.swap.max"
            if (self.path / swap).exists():
                (self.path / swap).write_text(str(limit_bytes) if self._v1 else "0")
        except OSError as error:
            raise NoCage(f"no cgroup with a memory limit at {self.path}: {error}") from error

    @property
    def command(self) -> list[str]:
        """Words before a command that make it run inside."""
        procs = self.path / "cgroup.procs"
        return ["sh", "-c", f'echo $$ > {procs} && exec "$@"', "caged"]

    def counter(self, v1: str, v2: str, name: str) -> int:
        """A number of the cgroup's own, from a file of `name value` lines."""
        text = (self.path / (v1 if self._v1 else v2)).read_text()
        return int(dict(line.split() for line in text.splitlines())[name])

    @property
    def oom_kills(self) -> int:
        """Processes that the kernel killed for want of memory."""
        return self.counter("memory.oom_control", "memory.events", "oom_kill")

    @property
    def unreclaimable_bytes(self) -> int:
        """What is charged and can't be dropped: anonymous memory, and sockets where counted."""
        anonymous = self.counter("memory.stat", "memory.stat", "rss" if self._v1 else "anon")
        if self._v1:
            tcp = self.path / "memory.kmem.tcp.usage_in_bytes"
            return anonymous + (int(tcp.read_text()) if tcp.exists() else 0)
        return anonymous + self.counter("", "memory.stat", "sock")

    def close(self) -> None:
        """Remove the cgroup; its processes have ended."""
        deadline = time.monotonic() + 20
        while True:
            try:
                self.path.rmdir()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


@dataclass
class Replica:
    """A server of `folder` with `memory_bytes`, within `limit_bytes`."""

    folder: Path
    memory_bytes: int
    limit_bytes: int
    max_context_tokens: int
    ports: dict[str, int] = field(init=False)
    cage: Cage = field(init=False)
    process: "subprocess.Popen[bytes]" = field(init=False)

    def __enter__(self) -> "Replica":
        self.ports = dict(
            zip(replicas.PORTS, replicas.free_ports(len(replicas.PORTS)), strict=True)
        )
        self.cage = Cage(self.limit_bytes)
        command = [
            *self.cage.command,
            *(sys.executable, "-m", "kvscaler_sidecar.main", "serve", "--host", "127.0.0.1"),
            *("--model-uri", str(self.folder), "--served-names", "m"),
            *("--memory-bytes", str(self.memory_bytes), "--memory-utilization-percent", "100"),
            *("--max-context-tokens", str(self.max_context_tokens), "--log-level", "warning"),
            *(w for name in replicas.PORTS for w in (f"--{name}-port", str(self.ports[name]))),
        ]
        try:
            self.process = subprocess.Popen(command, env=replicas.environment(), stdout=sys.stderr)
            replicas.wait_ready(self.process, self.url("metrics", "/health/ready"))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "process"):
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self.cage.close()

    def url(self, listener: str, path: str) -> str:
        """Of one of its ports."""
        return f"http://127.0.0.1:{self.ports[listener]}{path}"

    def state(self) -> dict[str, Any]:
        """Its own report."""
        with urllib.request.urlopen(self.url("metrics", "/state"), timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    @property
    def resident_bytes(self) -> int:
        """Resident set of the process."""
        return replicas.resident_bytes(self.process.pid)


def budget(folder: Path, pool_mib: int, max_context_tokens: int, dtype: str) -> dict[str, Any]:
    """The plan of a replica whose pool is about `pool_mib`."""

    def plan(memory_bytes: int) -> dict[str, Any]:
        return replicas.run(
            *("-m", "kvscaler_cli.main", "plan", str(folder), "--accelerator", "cpu"),
            *("-o", "json", "--memory", str(memory_bytes), "--memory-utilization", "1"),
            *("--weight-dtype", dtype, "--max-model-len", str(max_context_tokens)),
        )

    return plan(plan(1 << 40)["overheadBytes"] + pool_mib * replicas.MIB)
