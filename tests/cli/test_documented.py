"""What README, docs and `--help` show is what the command prints."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from kvscaler.models import catalogue
from kvscaler_cli.main import main
from kvscaler_cli.plan import EXAMPLES

ROOT = Path(__file__).resolve().parents[2]
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
TOLERANCE = 0.03
"""Constants move as more logs are read: an example is wrong when its figures are another answer."""


def documented():
    """`(file, command, output)` of every plan in a console block."""
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(r"```console\n(.*?)```", file.read_text("utf-8"), re.S):
            command, _, output = block.partition("\n")
            if command.startswith("$ kvscaler plan"):
                yield pytest.param(command[2:], output, id=file.name)


def numbers(text):
    return [float(found.replace(",", "")) for found in NUMBER.findall(text)]


def words(text):
    return re.sub(r"[▒█░▌\s]+", " ", NUMBER.sub("0", text)).strip()


@pytest.mark.parametrize(("command", "output"), list(documented()))
def test_documented_output_is_what_is_printed(command, output):
    result = CliRunner(env={"COLUMNS": "80"}).invoke(main, shlex.split(command)[1:])
    assert words(result.output) == words(output), f"now it prints:\n{result.output}"
    for shown, printed in zip(numbers(output), numbers(result.output), strict=True):
        assert printed == pytest.approx(shown, rel=TOLERANCE, abs=0.02), result.output


def test_there_are_examples_to_check():
    assert len(list(documented())) >= 2


def test_examples_of_help_can_be_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    facts = dict(catalogue.find("llama-3.1-8b").architecture.facts)
    (tmp_path / "config.json").write_text(json.dumps(facts))
    joined = EXAMPLES.replace("\\\n", " ")
    commands = [x.strip() for x in joined.splitlines() if x.strip().startswith("kvscaler plan")]
    assert len(commands) >= 5
    for command in commands:
        result = CliRunner().invoke(main, shlex.split(command)[1:])
        assert result.exit_code in (0, 1), f"{command}: {result.output}"
