"""`kvscaler plan` as a user meets it: table, JSON, YAML, exit codes, errors."""

import json

import pytest
import yaml
from click.testing import CliRunner
from kvscaler.models import catalogue
from kvscaler_cli.main import main


def run(*arguments):
    return CliRunner().invoke(main, ["plan", *arguments])


def test_table_shows_every_line_and_what_it_means_for_a_request():
    result = run("llama-3.1-8b", "--accelerator", "h100", "--engine", "vllm@0.11.0",
                 "--utilization", "90", "--prompt-tokens", "1200",
                 "--output-tokens", "300")  # fmt: skip
    assert result.exit_code == 0, result.output
    for words in ("weights", "14.99 GiB", "kv cache", "51.36 GiB", "131,072 tokens"):
        assert words in result.output
    assert "Requests of 1,200 + 300 tokens   279 at once, 94 blocks each" in result.output


@pytest.mark.parametrize(("flag", "load"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_machine_formats_hold_the_same_numbers_and_add_up(flag, load):
    result = run("smollm2-135m", "--accelerator", "cpu", "--memory", "2Gi", "-o", flag)
    document = load(result.output)
    assert result.exit_code == 0
    assert document["deviceBytes"] == 2 << 30
    assert document["usableBytes"] == document["overheadBytes"] + document["kvBytes"]
    assert document["overheadBytes"] == sum(line["bytes"] for line in document["lines"])
    assert document["poolBytes"] == document["blocks"] * document["blockBytes"]
    assert document["limits"]["kv_blocks"] == document["blocks"]
    assert document["fits"] is True


def test_what_does_not_fit_is_exit_code_1_with_the_remedy():
    result = run("llama-3.1-8b", "--accelerator", "rtx-4090", "--max-context", "131072")
    assert result.exit_code == 1
    assert "does not fit by" in result.output
    assert "would fit with an accelerator memory of" in result.output


def test_a_config_file_or_its_folder_serves_as_the_model(tmp_path):
    facts = dict(catalogue.find("llama-3.1-8b").architecture.facts)
    (tmp_path / "config.json").write_text(json.dumps(facts))
    for path in (tmp_path, tmp_path / "config.json"):
        result = run(str(path), "--accelerator", "h100", "-o", "json")
        assert json.loads(result.output)["modelDigest"] == (
            catalogue.find("llama-3.1-8b").architecture.digest
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpt-9", "--accelerator", "h100"], "'gpt-9' is not in the catalogue"),
        (["smollm2-135m", "--accelerator", "abacus"], "'abacus' is not known"),
        (["smollm2-135m", "--accelerator", "cpu"], "no memory of its own"),
        (["smollm2-135m", "--accelerator", "h100", "--engine", "Abacus"], "'Abacus'"),
        (["smollm2-135m", "--accelerator", "h100", "--memory", "lots"], "is not a quantity"),
        (["smollm2-135m", "--accelerator", "h100", "--memory", "0"], "no memory at all"),
        (["smollm2-135m", "--accelerator", "h100", "--kv-dtype", "int3"], "'int3'"),
        (["smollm2-135m", "--accelerator", "h100", "--output-tokens", "3"], "--prompt-tokens"),
        (["smollm2-135m"], "--accelerator"),
    ],
)
def test_a_wrong_question_is_exit_code_2_and_says_what_is_wrong(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize("text", ["not json", "[1, 2]", '{"model_type": "rwkv"}'])
def test_a_broken_config_names_the_file_or_the_fields(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    result = run(str(tmp_path), "--accelerator", "h100")
    assert result.exit_code == 2
    assert "config.json" in result.output or "model_type 'rwkv'" in result.output


def test_help_has_examples():
    result = run("--help")
    assert "Examples:" in result.output
    assert "kvscaler plan llama-3.1-8b --accelerator h100" in result.output
