"""The way into the process: it can be told to stop from its first moment.

In a container it is process 1, for which the kernel drops a signal that has no handler. A SIGTERM
that comes while libraries load, which takes many seconds on a busy node, would be lost, and
Kubernetes would wait for the whole grace period and then kill. So a handler is there before
anything else is imported. Until the serving process puts its own in place nothing was accepted, and
ending at once breaks nothing.
"""

import os
import signal


def main() -> int:
    """Run the command line; the exit code."""
    signal.signal(signal.SIGTERM, _leave)
    from kvscaler_sidecar.main import main as run  # noqa: PLC0415

    return run()


def _leave(number: int, frame: object) -> None:
    os._exit(0)
