"""The chart as helm renders it, without a cluster."""

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from localcluster import build

CHART = Path(__file__).parents[2] / "charts" / "kvscaler"
KUBE_VERSION = "1.36.0"
Object = dict[str, Any]
Values = Mapping[str, Any]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Chart:
    """Helm on this chart, with values as a mapping."""

    def __init__(self, folder: Path) -> None:
        build.ensure("helm")
        self._helm = build.path("helm")
        self._values = folder / "values.yaml"
        self._rendered: dict[str, str] = {}

    def helm(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """helm's result, whatever its exit code."""
        return subprocess.run(
            [self._helm, *arguments], capture_output=True, text=True, check=False, timeout=60
        )

    def try_render(
        self, values: Values | None = None, *arguments: str, release: str = "kvscaler"
    ) -> subprocess.CompletedProcess[str]:
        """`helm template` with these values on top of the chart's own."""
        self._values.write_text(yaml.safe_dump(dict(values or {})), encoding="utf-8")
        return self.helm(
            "template", release, str(CHART), "--namespace=kvscaler-system",
            f"--kube-version={KUBE_VERSION}", f"--values={self._values}", *arguments,
        )  # fmt: skip

    def render(
        self, values: Values | None = None, *arguments: str, release: str = "kvscaler"
    ) -> list[Object]:
        """The objects that these values give; helm runs once for the same question."""
        question = repr((values, arguments, release))
        if question not in self._rendered:
            done = self.try_render(values, *arguments, release=release)
            assert done.returncode == 0, done.stderr
            self._rendered[question] = done.stdout
        documents = yaml.load_all(self._rendered[question], Loader=LOADER)
        return [document for document in documents if document]


@pytest.fixture(scope="session")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Chart:
    return Chart(tmp_path_factory.mktemp("chart"))


@pytest.fixture
def render(chart: Chart) -> Callable[..., list[Object]]:
    return chart.render
