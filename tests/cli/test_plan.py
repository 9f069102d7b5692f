"""`kvscaler plan` as a user meets it: table, JSON, YAML, exit codes, errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from kvscaler import hardware
from kvscaler.budget import Deployment, EngineSettings, profile_for
from kvscaler.models import catalogue
from kvscaler_cli.main import main

ROOT = Path(__file__).resolve().parents[2]
H100 = ("llama-3.1-8b", "--accelerator", "h100", "--engine", "vllm@0.11.0")
CHAT = ("--prompt-tokens", "1200", "--output-tokens", "300")


def run(*arguments, columns=80):
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(main, ["plan", *arguments])


def answer(*arguments):
    return json.loads(run(*arguments, "-o", "json").output)


def test_table_shows_every_line_and_what_it_means_for_a_request():
    result = run(*H100, *CHAT)
    assert result.exit_code == 0, result.output
    document = answer(*H100, *CHAT)
    # vLLM printed 51.38 GiB (llm-d-planner, docs/empirical-vllm-memory-results.md).
    assert document["kvBytes"] / 2**30 == pytest.approx(51.38, rel=0.01)
    count = document["blocks"] // 94
    pool = f"{document['kvBytes'] / 2**30:.2f} GiB"
    for words in ("weights", "14.99 GiB", "kv cache", pool, "131,072 tokens"):
        assert words in result.output
    assert f"It fits, and holds {count} requests of 1,200 + 300 tokens at once." in result.output
    assert "Each request      94 blocks for 1,500 tokens" in result.output


@pytest.mark.parametrize("columns", [80, 100, 120, 200])
@pytest.mark.parametrize(
    "arguments",
    [
        (*H100, *CHAT, "--concurrency", "500"),
        ("qwen3-32b", "--accelerator", "rtx-4090", "--engine", "vllm"),
        ("llama-3.1-405b", "--accelerator", "l4", "--engine", "vllm"),
        (*H100, *CHAT, "--concurrency", "5000"),
        ("llama-3.1-70b", *H100[1:], "--tensor-parallel", "2"),
        ("gemma-4-26b-a4b", "--accelerator", "a100", "--engine", "sglang", "--concurrency", "9"),
        ("smollm2-135m", "--accelerator", "cpu", "--memory", "2Gi"),
    ],
)
def test_no_line_is_wider_than_the_terminal(columns, arguments):
    result = run(*arguments, columns=columns)
    assert result.exit_code in (0, 1), result.output
    assert max(len(line) for line in result.output.splitlines()) <= columns


def test_notes_are_shown_where_there_is_room_and_in_wide():
    assert "NOTE" not in run(*H100).output
    assert "sampler pass of 1024" in run(*H100, columns=120).output
    wide = run(*H100, "-o", "wide").output
    assert "RANGE" in wide
    assert "sampler pass of 1024" in wide


@pytest.mark.parametrize(("flag", "load"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_machine_formats_hold_the_same_numbers_and_add_up(flag, load):
    result = run("smollm2-135m", "--accelerator", "cpu", "--memory", "2Gi", "--limits", "-o", flag)
    document = load(result.output)
    assert result.exit_code == 0
    assert document["deviceBytes"] == 2 << 30
    assert document["usableBytes"] == document["overheadBytes"] + document["kvBytes"]
    assert document["overheadBytes"] == sum(line["bytes"] for line in document["lines"])
    assert document["poolBytes"] == document["blocks"] * document["blockBytes"]
    assert document["limits"]["kv_blocks"] == document["blocks"]
    assert document["fits"] is document["holds"] is True


def test_the_model_may_be_named_either_way():
    named = answer("--model", *H100)
    assert named == answer(*H100)
    assert named["model"] == "llama-3.1-8b"


def test_what_does_not_fit_is_exit_code_1_with_what_would():
    result = run("llama-3.1-8b", "--accelerator", "rtx-4090", "--max-model-len", "131072")
    assert result.exit_code == 1
    assert "It does not fit: " in result.output
    assert "One request of 131,072 tokens needs 16.00 GiB" in " ".join(result.output.split())
    assert "What would make it fit, the cheapest first:" in result.output
    assert "--accelerator a100-40gb" in result.output
    assert "missing" in result.output


def test_changes_are_flags_that_work_when_pasted():
    question = ("qwen3-32b", "--accelerator", "rtx-4090", "--engine", "vllm")
    changes = answer(*question)["changes"]
    assert len(changes) == 3
    for change in changes:
        flags = change["flags"].split()
        asked = [x for x in question if "--accelerator" not in flags or x != "rtx-4090"]
        if "--accelerator" in flags:
            asked.remove("--accelerator")
        pasted = answer(*asked, *flags)
        assert pasted["holds"]
        assert pasted["kvBytes"] == change["kvBytes"]


def test_a_demand_that_is_not_held_is_exit_code_1_with_the_fewest_devices():
    held = answer(*H100, *CHAT, "--concurrency", "200")
    assert held["holds"]
    count = held["request"]["concurrent"]
    assert 200 <= count < 500
    assert held["concurrency"]["fewestDevices"]["devices"] == 1
    result = run(*H100, *CHAT, "--concurrency", "500")
    assert result.exit_code == 1
    assert (
        f"No: it holds {count} of the 500 requests of 1,200 + 300 tokens at once." in result.output
    )
    assert f"Fewest devices    2 as 2 replicas of 1, {count} requests each" in result.output
    assert "--kv-dtype fp8_e4m3" in result.output


def test_a_concurrency_alone_asks_how_long_each_may_be():
    document = answer(*H100, "--concurrency", "100")
    longest = document["concurrency"]["largestContextTokens"]
    assert longest == document["blocks"] // 100 * 16
    assert answer(*H100, "--prompt-tokens", str(longest), "--concurrency", "100")["holds"]
    longer = run(*H100, "--prompt-tokens", str(longest + 1), "--concurrency", "100")
    assert longer.exit_code == 1
    too_many = run(*H100, "--max-num-seqs", "8", "--concurrency", "9")
    assert too_many.exit_code == 1
    assert "No: it runs at most 8 of the 9 requests at once." in too_many.output
    assert "--max-num-seqs 9" in too_many.output


def test_a_request_longer_than_the_context_is_not_held():
    result = run(*H100, "--max-model-len", "1024", *CHAT)
    assert result.exit_code == 1
    assert "is longer than the longest context of 1,024" in " ".join(result.output.split())
    assert "--max-model-len 1500" in result.output


def test_smaller_types_are_shown_with_their_gain():
    alternatives = {x["flags"]: x for x in answer(*H100, *CHAT)["alternatives"]}
    assert (
        alternatives["--kv-dtype fp8_e4m3"]["atOnce"]
        == answer(*H100, *CHAT, "--kv-dtype", "fp8")["request"]["concurrent"]
    )
    smaller, now = (
        alternatives["--kv-dtype fp8_e4m3"]["atOnce"],
        answer(*H100, *CHAT)["request"]["concurrent"],
    )
    assert f"{smaller}   {smaller / now:.2f}x" in run(*H100, *CHAT).output


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--memory-utilization", "0.8"), {"utilizationPercent": 80}),
        (("--memory-utilization", "80%"), {"utilizationPercent": 80}),
        (("--max-model-len", "4096"), {"maxContextTokens": 4096}),
        (("--max-num-seqs", "7"), {"maxSequences": 7}),
        (("--max-num-batched-tokens", "512"), {"stepTokens": 512}),
        (("--block-size", "32"), {"blockTokens": 32}),
        (("--kv-dtype", "fp8"), {"kvDtype": "fp8_e4m3"}),
        (("--weight-dtype", "float16"), {"computeDtype": "float16"}),
        (("--tensor-parallel", "2", "--pipeline-parallel", "2"), {"devices": 4}),
        (("--data-parallel", "3"), {"devices": 3, "pools": 3}),
        (("--kv-bytes", "10GiB"), {"kvBytes": 10 << 30, "blocks": 5120}),
    ],
)
def test_every_flag_reaches_the_budget(flags, expected):
    document = answer(*H100, *flags)
    assert {name: document[name] for name in expected} == expected


def test_weights_of_another_type_are_an_override_and_smaller():
    document = answer(*H100, "--weight-dtype", "awq")
    weights = document["lines"][0]["bytes"]
    assert weights < 0.4 * answer(*H100)["lines"][0]["bytes"]
    assert document["overrides"] == ["weights = awq-g128 (the model has bfloat16)"]


def test_adapters_are_a_line_and_eager_mode_has_no_graphs():
    newest = ("llama-3.1-8b", "--accelerator", "h100", "--engine", "vllm")
    names = [
        line["name"]
        for line in answer(*newest, "--max-loras", "4", "--max-lora-rank", "16")["lines"]
    ]
    assert names == ["weights", "adapters", "activations", "non-torch", "cuda graphs"]
    eager = answer(*newest, "--enforce-eager")["lines"]
    assert [line["name"] for line in eager] == ["weights", "activations", "non-torch"]


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", "with vllm 0."),
        ("vllm@0.11.0", "with vllm 0.11.0\n"),
        ("sglang@v0.5.3", "with sglang 0.5.3\n"),
        ("tensorrtllm@0.17.0", "with tensorrt-llm 0.17.0\n"),
        ("tgi", "with tgi\n"),
    ],
)
def test_the_engine_is_named_with_the_version_that_was_counted_with(engine, words):
    output = run(*H100[:3], "--engine", engine).output
    assert words in output
    assert ("(assumed)" in output) is (engine == "vllm")


def test_a_device_may_be_described_instead_of_named():
    document = answer("llama-3.1-8b", "--memory", "79.18GiB", "--bandwidth", "3.35TB/s",
                      "--engine", "vllm@0.11.0", *CHAT)  # fmt: skip
    assert document["accelerator"] == "custom"
    assert document["kvBytes"] == pytest.approx(answer(*H100)["kvBytes"], rel=1e-3)
    count = document["request"]["concurrent"]
    # All of count x 94 blocks of 2 MiB and 14.0 GiB of weights without embeddings, at 3.35 TB/s.
    assert document["decodeStepFloorSeconds"] == pytest.approx(
        (count * 94 * (2 << 20) + (14.99 - 0.98) * 2**30) / 3.35e12, rel=0.01
    )
    assert "named" not in str(answer(*H100)["warnings"])
    assert any("--accelerator" in text for text in document["warnings"])


def test_overrides_are_shown(tmp_path):
    flags = ("--memory", "70GiB", "--override", "num_key_value_heads=4")
    result = run(*H100, *flags)
    assert "Overridden        num_key_value_heads = 4 (the model says 8)" in result.output
    assert "memory = 70.00 GiB (nvidia-h100-80gb-hbm3 reports 79.18 GiB)" in result.output
    assert answer(*H100, *flags)["blockBytes"] == answer(*H100)["blockBytes"] // 2
    facts = dict(catalogue.find("llama-3.1-8b").architecture.facts)
    (tmp_path / "config.json").write_text(json.dumps(facts))
    assert (
        answer(str(tmp_path), *H100[1:], *flags)["overrides"] == answer(*H100, *flags)["overrides"]
    )


@pytest.mark.parametrize("printed", ["50GiB", "25600blocks", "409,600 tokens"])
def test_an_observation_replaces_the_prediction_and_corrects_the_alternatives(printed):
    predicted, seen = answer(*H100), answer(*H100, "--observed", printed)
    assert seen["blocks"] == 25_600
    assert seen["observed"]["predictedKvBytes"] == predicted["kvBytes"]
    assert {line["basis"] for line in seen["lines"]} >= {"observed"}
    cache = {x["flags"]: x for x in seen["alternatives"]}["--kv-dtype fp8_e4m3"]
    assert cache["kvBytes"] == pytest.approx(seen["kvBytes"], rel=1e-3)
    before = predicted["kvBytes"] / 2**30
    words = f"50.00 GiB of KV cache where {before:.2f} GiB were predicted ({50 / before - 1:+.1%})"
    assert words in run(*H100, "--observed", printed).output


def test_tokens_of_a_hybrid_pool_are_counted_as_the_engine_prints_them():
    question = ("gemma-4-26b-a4b", "--accelerator", "h100", "--engine", "vllm@0.22.0")
    card = hardware.find("h100")
    profile = profile_for("vllm@0.22.0", card)
    asked = Deployment(catalogue.find(question[0]).architecture, card, profile, EngineSettings())
    budget = asked.budget()
    printed = profile.printed_tokens(budget.layout, budget.blocks, budget.max_context_tokens)
    seen = answer(*question, "--observed", f"{printed}tokens")
    assert seen["blocks"] == pytest.approx(budget.blocks, rel=1e-3)


def test_a_config_file_or_its_folder_serves_as_the_model(tmp_path):
    facts = dict(catalogue.find("llama-3.1-8b").architecture.facts)
    (tmp_path / "config.json").write_text(json.dumps(facts))
    for path in (tmp_path, tmp_path / "config.json"):
        assert answer(str(path), "--accelerator", "h100")["modelDigest"] == (
            catalogue.find("llama-3.1-8b").architecture.digest
        )


def test_prediction_layers_speculate_where_the_model_has_some():
    question = (
        "deepseek-v3",
        "--accelerator",
        "h200",
        "--engine",
        "vllm",
        "--tensor-parallel",
        "8",
    )
    plain, drafting = answer(*question), answer(*question, "--speculative-tokens", "1")
    assert drafting["lines"][0]["bytes"] > plain["lines"][0]["bytes"]
    assert drafting["blockBytes"] == plain["blockBytes"] * 62 // 61
    llama = answer(*H100, "--speculative-tokens", "3")
    assert any("draft model" in text for text in llama["warnings"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("qwen3-30b-a3b", "--tensor-parallel", "8"), "copies of keys and values"),
        (("llama-3.1-8b", "--max-model-len", "200000"), "longer than the model's own context"),
        (("llama-3.1-70b", "--tensor-parallel", "2"), "start only with --max-model-len"),
        (("llama-3.1-8b", "--prompt-tokens", "100"), "raise --max-num-seqs"),
        (("llama-3.1-8b", "--tensor-parallel", "3"), "do not divide among 3 ranks"),
    ],
)
def test_warnings_name_what_binds_or_is_lost(arguments, words):
    document = answer(*arguments, "--accelerator", "h100", "--engine", "vllm@0.20.0")
    assert any(words in text for text in document["warnings"]), document["warnings"]


SMOL = ("smollm2-135m", "--accelerator", "h100")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gpt-9", "--accelerator", "h100"), "--model: model 'gpt-9' is not in the catalogue"),
        (("./gpt-9.json", "--accelerator", "h100"), "--model: there is no file ./gpt-9.json"),
        (("--accelerator", "h100"), "no model is named"),
        ((*SMOL, "--model", "qwen3-8b"), "two models are named"),
        (("smollm2-135m", "--accelerator", "abacus"), "--accelerator: accelerator 'abacus'"),
        (("smollm2-135m", "--accelerator", "cpu"), "--accelerator cpu has no memory of its own"),
        (("smollm2-135m",), "no device is named: give --accelerator"),
        ((*SMOL, "--engine", "Abacus"), "--engine: no memory profile for engine 'Abacus'"),
        ((*SMOL, "--engine", "vllm@new"), "--engine: engine version 'new'"),
        ((*SMOL, "--memory", "lots"), "'lots' is no amount of memory"),
        ((*SMOL, "--memory", "0"), "'--memory': '0' is no amount of memory"),
        ((*SMOL, "--bandwidth", "fast"), "'--bandwidth': 'fast' is no bandwidth"),
        ((*SMOL, "--memory-utilization", "90"), "for 90 percent write 90%"),
        ((*SMOL, "--memory-utilization", "nan"), "'nan' is no share of memory"),
        ((*SMOL, "--kv-dtype", "int3"), "--kv-dtype: KV cache type 'int3'"),
        ((*SMOL, "--weight-dtype", "int3"), "--weight-dtype: quantization 'int3'"),
        ((*SMOL, "--output-tokens", "3"), "--output-tokens needs --prompt-tokens"),
        ((*SMOL, "--override", "heads"), "--override 'heads' is no FIELD=VALUE"),
        ((*SMOL, "--override", "hidden_size=-1"), "hidden_size is -1"),
        ((*SMOL, "--observed", "much"), "'much' is no size of a pool"),
        ((*SMOL, "--observed", "900GiB"), "--observed: an observed pool of"),
        ((*SMOL, "--observed", "1GiB", "--kv-bytes", "1GiB"), "give one of them"),
        ((*SMOL, "--max-loras", "2"), "--max-loras and --max-lora-rank go together"),
        ((*SMOL, "--tensor-parallel", "2"), "the kvscaler engine runs on one device"),
        ((*SMOL, "--kv-dtype", "int8_per_token_head"), "the kvscaler engine does not have it"),
        ((*SMOL, "--tensor-parallel", "0"), "'--tensor-parallel'"),
        ((*SMOL, "--engine", "vllm", "--context-parallel", "2"), "does not divide"),
        ((*SMOL, "--limits"), "--limits are for machines"),
        (("gpt-oss-20b", "--accelerator", "h100"), "serve it with another engine"),
    ],
)
def test_a_wrong_question_is_exit_code_2_and_says_what_is_wrong(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert words in result.output


@pytest.mark.parametrize("text", ["not json", "[1, 2]", '{"model_type": "rwkv"}', "[" * 100_000])
def test_a_broken_config_names_the_file(tmp_path, text):
    file = tmp_path / "config.json"
    file.write_text(text)
    for path in (tmp_path, file):
        result = run(str(path), "--accelerator", "h100")
        assert result.exit_code == 2
        assert str(file) in result.output.replace("\n", "")


def test_a_terminal_without_unicode_gets_plain_characters(monkeypatch):
    result = CliRunner(charset="ascii").invoke(main, ["plan", *H100, *CHAT])
    assert result.exit_code == 0, result.output
    assert result.output.isascii()
    assert "###" in result.output


def test_help_has_examples_and_names_every_flag():
    result = run("--help")
    assert "Examples:" in result.output
    assert "kvscaler plan llama-3.1-8b --accelerator h100" in result.output
    for flag in (
        "--model", "--accelerator", "--memory", "--bandwidth", "--engine", "--tensor-parallel",
        "--pipeline-parallel", "--data-parallel", "--memory-utilization", "--kv-dtype",
        "--weight-dtype", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens",
        "--block-size", "--speculative-tokens", "--prompt-tokens", "--output-tokens",
        "--concurrency", "--kv-bytes", "--output",
    ):  # fmt: skip
        assert f"{flag} " in result.output


@pytest.mark.parametrize(
    ("output", "loaded"), [("table", "[]"), ("json", "[]"), ("yaml", "['yaml']")]
)
def test_a_plan_loads_only_what_it_shows(output, loaded):
    # What start-up costs is measured by bench/plan_process.py; this holds what it depends on.
    program = (
        "import sys\n"
        "from kvscaler_cli.main import main\n"
        f"main(['plan', *{H100!r}, '-o', {output!r}], standalone_mode=False)\n"
        "heavy = [x for x in ('numpy', 'pydantic', 'yaml') if x in sys.modules]\n"
        "print(heavy, file=sys.stderr)\n"
    )
    paths = os.pathsep.join(str(ROOT / room) for room in ("core", "cli", "crds"))
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        check=True,
        timeout=60,
    )
    assert done.stderr.strip() == loaded
