"""`kvscaler list`: every name that `plan` takes."""

import json

import pytest
from click.testing import CliRunner
from kvscaler import hardware
from kvscaler.models import catalogue
from kvscaler_cli.main import main


def run(*arguments):
    return CliRunner().invoke(main, ["list", *arguments])


@pytest.mark.parametrize("what", ["accelerators", "models"])
def test_table_and_json_name_them_all(what):
    known = hardware.accelerators() if what == "accelerators" else catalogue.entries()
    table = run(what).output.splitlines()
    items = json.loads(run(what, "-o", "json").output)[what]
    assert table[0].startswith("NAME")
    assert len(table) - 1 == len(items) == len(known)
    for line, item in zip(table[1:], items, strict=True):
        assert line.startswith(item["name"] + " ") or line == item["name"]
        assert item["source"]


def test_what_is_listed_can_be_planned_with():
    assert "79.18 GiB" in run("accelerators").output
    result = CliRunner().invoke(main, ["plan", "llama-3.1-8b", "--accelerator", "h1000"])
    assert result.exit_code == 2
    assert "kvscaler list accelerators" in result.output
    assert run("nonsense").exit_code == 2
