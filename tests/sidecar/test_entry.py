"""The first moment of the process: it can be told to stop before anything is loaded."""

import os
import signal
import subprocess
import sys
from pathlib import Path


def test_sigterm_while_libraries_load_exits_0(tmp_path: Path) -> None:
    """As process 1 of a container it would get no signal that it has no handler for."""
    (tmp_path / "uvloop.py").write_text(
        "import sys, time\nprint('importing', flush=True)\ntime.sleep(3600)\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-m", "kvscaler_sidecar", "serve", "--help"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as popen:
        assert popen.stdout is not None
        assert popen.stdout.readline() == b"importing\n"
        popen.send_signal(signal.SIGTERM)
        try:
            assert popen.wait(60) == 0
        finally:
            popen.kill()
