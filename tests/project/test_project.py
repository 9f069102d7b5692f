"""Rules of the project that no other tool checks."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("core", "cli", "crds", "operator", "sidecar", "kernels")


def test_operator_folder_never_shadows_the_standard_library():
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_no_package_files_among_the_tests():
    assert [str(p) for p in (ROOT / "tests").rglob("__init__.py")] == []


def test_the_brain_needs_pydantic_only():
    probe = (
        "import sys; before = set(sys.modules)\n"
        "import kvscaler.protocol.state, kvscaler.budget, kvscaler.engine, kvscaler.performance\n"
        "import kvscaler.traffic, kvscaler.scaling, kvscaler.dispatch, kvscaler.advice\n"
        "heavy = {'torch', 'numpy', 'aiohttp', 'kubernetes', 'kopf', 'requests', 'yaml'}\n"
        "print(sorted(heavy & {m.split('.')[0] for m in sys.modules}))"
    )
    out = subprocess.run(
        [sys.executable, "-c", probe],
        check=True, capture_output=True, text=True, cwd=ROOT / "core",
    )  # fmt: skip
    assert out.stdout.strip() == "[]"


def test_extras_keep_torch_out_of_the_operator():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert not any(d.startswith(("torch", "triton", "numpy")) for d in extras["operator"])
    assert project["dependencies"] == ["pydantic>=2.11,<3"]


@pytest.mark.parametrize("extra", ["operator", "sidecar", "cli", "dev"])
def test_pins_have_hashes_and_no_addresses(extra):
    text = (ROOT / "requirements" / f"{extra}.txt").read_text()
    assert "://" not in text
    pins = [line for line in text.splitlines() if "==" in line]
    assert pins
    assert all(line.endswith("\\") for line in pins)


def test_the_wheel_holds_the_packages_and_nothing_else(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q",
         "-w", str(tmp_path), str(ROOT)],
        check=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("kvscaler-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {
        package.name
        for room in ROOMS
        for package in (ROOT / room).iterdir()
        if (package / "__init__.py").exists()
    }
    assert "kvscaler/models/catalogue.json" in names
    assert "kvscaler/hardware/accelerators.json" in names
    assert all(f"{top}/py.typed" in names for top in tops)
