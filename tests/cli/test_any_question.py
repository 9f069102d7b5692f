"""Whatever is asked: an answer that adds up, or an error in words; never a traceback, never a wait."""

import json

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from kvscaler import hardware
from kvscaler.budget.profiles import ENGINES
from kvscaler.models import catalogue
from kvscaler_cli.main import main

COUNTS = st.sampled_from([0, 1, 2, 3, 7, 8, 64, 1000, 32_768, 10**6, 10**9, 10**11])
FLAGS = {
    "--tensor-parallel": st.sampled_from([1, 2, 3, 4, 8, 64, 10**9]),
    "--pipeline-parallel": st.sampled_from([1, 2, 5, 10**9]),
    "--data-parallel": st.sampled_from([1, 2, 8, 10**9]),
    "--context-parallel": st.sampled_from([1, 2, 8]),
    "--memory-utilization": st.sampled_from(["0.5", "0.9", "1", "100%", "1e9", "0"]),
    "--kv-dtype": st.sampled_from(["auto", "fp8", "int8_per_token_head", "nvfp4", "q4_0", "x"]),
    "--weight-dtype": st.sampled_from(["auto", "bfloat16", "fp8", "awq", "gguf-q4_k_m", "x"]),
    "--max-model-len": COUNTS,
    "--max-num-seqs": COUNTS,
    "--max-num-batched-tokens": COUNTS,
    "--block-size": COUNTS,
    "--speculative-tokens": st.sampled_from([0, 1, 5, 10**9]),
    "--prompt-tokens": COUNTS,
    "--output-tokens": COUNTS,
    "--concurrency": COUNTS,
    "--kv-bytes": st.sampled_from(["1MiB", "10GiB", "1PiB", "500TiB", "-1"]),
    "--observed": st.sampled_from(["1MiB", "10GiB", "1blocks", "5000tokens", "900000TiB"]),
    "--override": st.sampled_from(
        ["num_hidden_layers=3", "vocab_size=[1]", "a=b", "=", "head_dim=0"]
    ),
    "--memory": st.sampled_from(["1KiB", "1GiB", "24GiB", "500GiB"]),
}


def questions():
    flags = st.fixed_dictionaries({}, optional=FLAGS)
    names = st.sampled_from([entry.name for entry in catalogue.entries()])
    cards = st.sampled_from([card.name for card in hardware.accelerators()])
    return st.tuples(names, cards, st.sampled_from(ENGINES), flags)


@given(questions())
@settings(max_examples=300)
def test_every_question_has_an_answer_that_adds_up_or_an_error_in_words(question):
    model, card, engine, flags = question
    arguments = ["plan", model, "--accelerator", card, "--engine", engine]
    arguments += [str(word) for pair in flags.items() for word in pair]
    result = CliRunner().invoke(main, [*arguments, "-o", "json"])
    assert result.exit_code in (0, 1, 2), (arguments, result.exception)
    if result.exit_code == 2:
        assert "Error: " in result.output
        return
    document = json.loads(result.output)
    assert document["holds"] is (result.exit_code == 0)
    parts = document["overheadBytes"] + document["kvBytes"] + document["unusedBytes"]
    assert parts == document["deviceBytes"]
    assert all(change["fits"] for change in document["changes"])
    table = CliRunner().invoke(main, arguments)
    assert table.exit_code == result.exit_code, (arguments, table.exception)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"\x00\xff" * 100),
        ("config.json", b" " * (200 << 20)),
        ("config.json", b'{"model_type": "llama", "hidden_size": 1e400}'),
        ("config.json", b'{"model_type": "llama", "text_config": {"text_config": 3}}'),
        ("config.json", b'{"model_type": ["llama"]}'),
        ("model.gguf", b"GGUF"),
        ("model.gguf", b"GGUF\x03\x00\x00\x00" + b"\xff" * 16),
        ("model.gguf", b""),
    ],
)
def test_a_hostile_file_is_an_error_that_names_it(tmp_path, name, content):
    file = tmp_path / name
    file.write_bytes(content)
    result = CliRunner().invoke(main, ["plan", str(file), "--accelerator", "h100"])
    assert result.exit_code == 2, result.output
    assert str(file) in result.output.replace("\n", "")


def test_an_empty_folder_and_a_folder_as_a_gguf_are_named(tmp_path):
    (tmp_path / "x.gguf").mkdir()
    for path in (tmp_path, tmp_path / "x.gguf"):
        result = CliRunner().invoke(main, ["plan", str(path), "--accelerator", "h100"])
        assert result.exit_code == 2, result.output
        assert path.name in result.output.replace("\n", "")
