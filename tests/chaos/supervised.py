"""The operator as a process of its own, kept by a kubelet's rules.

What matters about a fault that ends the operator is whether it comes back and how long that takes.
So it runs as it does in its Pod: restarted when it ends (at once, then ever more slowly), and ended
when its liveness fails three times.
"""

import asyncio
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import aiohttp
from kvscaler_operator.settings import Settings

ROOT = Path(__file__).parents[2]
ROOMS = ("core", "crds", "operator")
PROBE_SECONDS, PROBE_TIMEOUT_SECONDS, PROBE_FAILURES, GRACE_SECONDS = 10.0, 5.0, 3, 30.0
"""As the chart has them."""
BACK_OFF_SECONDS = 10.0
STARTUP_SECONDS = 60.0


class SupervisedOperator:
    """Starts `kvscaler_operator` with `settings`, again and again until stopped."""

    def __init__(self, settings: Settings, log: Path) -> None:
        self._settings = settings
        self._log = log
        self._task: asyncio.Task[None] | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.exits: list[int] = []
        """Exit statuses so far; negative for a signal."""
        self.liveness_kills = 0

    async def start(self) -> None:
        """Begin, and wait until it is ready for the first time."""
        self._task = asyncio.create_task(self._keep())
        await self.until_ready(STARTUP_SECONDS)

    async def stop(self) -> None:
        """End it for good."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def until_ready(self, seconds: float) -> None:
        """Wait until its readiness says so."""
        deadline = time.monotonic() + seconds
        while not await self.answers("readyz"):
            assert time.monotonic() < deadline, f"not ready within {seconds:.0f} s:\n{self.log()}"
            await asyncio.sleep(0.1)

    async def answers(self, path: str) -> bool:
        """Whether a probe is answered with 200 in time."""
        url = f"http://127.0.0.1:{self._settings.probe_port}/{path}"
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_SECONDS)
        with suppress(aiohttp.ClientError, TimeoutError):
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(url) as answer,
            ):
                return answer.status == 200
        return False

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def log(self) -> str:
        """The end of what it said."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])

    async def _keep(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._back_off_seconds())
                await self._launch()
                assert self.process is not None
                watching = asyncio.create_task(self._watch(self.process))
                try:
                    self.exits.append(await self.process.wait())
                finally:
                    watching.cancel()
        finally:
            if self.process is not None and self.process.returncode is None:
                self.process.send_signal(signal.SIGCONT)
                self.process.kill()
                await self.process.wait()

    def _back_off_seconds(self) -> float:
        """The first restart is immediate. (Failures are forgotten after ten minutes of peace, which
        no test has.)"""
        restarts = len(self.exits)
        return 0.0 if restarts < 2 else min(300.0, BACK_OFF_SECONDS * 2.0 ** (restarts - 2))

    async def _launch(self) -> None:
        path = os.pathsep.join(str(ROOT / room) for room in ROOMS)
        with self._log.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "kvscaler_operator", *flags(self._settings),
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, cwd="/",
                env={"PATH": os.environ["PATH"], "PYTHONPATH": path},
            )  # fmt: skip

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Liveness, which begins when it has answered once."""
        begun = time.monotonic()
        while not await self.answers("healthz") and time.monotonic() - begun < STARTUP_SECONDS:
            await asyncio.sleep(1.0)
        failures = 0
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            failures = 0 if await self.answers("healthz") else failures + 1
            if failures == PROBE_FAILURES:
                self.liveness_kills += 1
                process.terminate()
                await asyncio.sleep(GRACE_SECONDS)
                process.kill()


def flags(settings: Settings) -> list[str]:
    """The command line that means these settings."""
    words = []
    for setting in dataclasses.fields(Settings):
        value = getattr(settings, setting.name)
        if value is None or value == ():
            continue
        text = ",".join(value) if isinstance(value, (tuple, frozenset)) else str(value)
        words.append(f"--{setting.name.replace('_', '-')}={text}")
    return words


def with_changes(settings: Settings, **changes: object) -> Settings:
    """`settings` with some changed."""
    values: Mapping[str, object] = {
        setting.name: getattr(settings, setting.name) for setting in dataclasses.fields(Settings)
    }
    return Settings(**{**values, **changes})  # type: ignore[arg-type]
