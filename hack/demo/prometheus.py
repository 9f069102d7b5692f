"""A real Prometheus beside the local cluster, scraping the service's Pods every 5 s.

The distribution's Prometheus has no Kubernetes discovery, so targets come by file: this writes
them from what the observer sees, with the target labels that discovery would give.
"""

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

PORT = 9093
CONFIG = """\
global: {scrape_interval: 5s, scrape_timeout: 4s}
scrape_configs:
- job_name: kvscaler
  file_sd_configs: [{files: ["%s"], refresh_interval: 1s}]
"""


class Prometheus:
    """Runs in the node's network namespace, so that Pods reach it at the node's address."""

    def __init__(
        self, binary: Path, folder: Path, network_namespace: Path, address: str, port: int = PORT
    ) -> None:
        self.url = f"http://{address}:{port}"
        self._listen = f"{address}:{port}"
        self._binary, self._folder = binary, folder
        self._network_namespace = network_namespace
        self._targets = folder / "targets.json"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._targets.write_text("[]")
        config = self._folder / "prometheus.yml"
        config.write_text(CONFIG % self._targets)
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["nsenter", f"--net={self._network_namespace}", "--", str(self._binary),
                 f"--config.file={config}", f"--storage.tsdb.path={self._folder / 'data'}",
                 f"--web.listen-address={self._listen}", "--log.level=warn"],
                stdout=log, stderr=log,
            )  # fmt: skip
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.stop()

    def stop(self) -> None:
        """End the process; safe to call twice."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def set_targets(self, namespace: str, pods: dict[str, str]) -> None:
        """Scrape these Pods (name to address) from now on."""
        groups = [
            {"targets": [f"{ip}:9090"], "labels": {"namespace": namespace, "pod": name}}
            for name, ip in sorted(pods.items())
        ]
        text = json.dumps(groups)
        if text != self._targets.read_text():
            new = self._targets.with_suffix(".new")
            new.write_text(text)
            new.rename(self._targets)
