"""Options, and what is refused before weights are loaded."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from kvscaler.protocol.limits import AdmissionMode, ChargePolicy
from kvscaler_sidecar.config import ConfigurationError, Settings, load, variable_name
from kvscaler_sidecar.start import StartRefused, container_memory_limit_bytes, plan_start

from tests.sidecar.replicas import settings_for

GIB = 1 << 30


def test_a_flag_wins_over_its_variable_and_both_over_the_default() -> None:
    environment = {
        "KVSCALER_MODEL_URI": "builtin://smollm2-135m",
        "KVSCALER_MEMORY_BYTES": "1000",
        "KVSCALER_SERVED_NAMES": "a, b",
        "KVSCALER_PREFIX_CACHING": "Disabled",
        "KVSCALER_LIMITS": '{"charge": "WorstCase"}',
    }
    assert load({}, environment).compute_dtype == "Auto"
    environment["KVSCALER_COMPUTE_DTYPE"] = "float32"
    settings = load({"memory_bytes": "2000", "threads": None}, environment)
    assert settings.compute_dtype == "float32"
    assert settings.memory_bytes == 2000
    assert settings.served_names == ("a", "b")
    assert settings.prefix_caching is False
    assert settings.limits == {"charge": "WorstCase"}
    assert settings.block_tokens == 16
    assert settings.http_port == 8000


def test_the_served_name_comes_from_the_uri() -> None:
    settings = load({"model_uri": "builtin://smollm2-135m", "memory_bytes": "1"}, {})
    assert settings.served_names == ("smollm2-135m",)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(
            {"block_tokens": "0", "compute_dtype": "int4", "limits": '{"kv_blocks": 5}'},
            {"KVSCALER_HTTP_PORT": "http", "KVSCALER_DRAIN_TIMEOUT_SECONDS": "nan"},
        )
    words = str(caught.value)
    for part in (
        "--model-uri",
        "--memory-bytes",
        "--block-tokens='0'",
        "--compute-dtype='int4'",
        "KVSCALER_HTTP_PORT='http'",
        "kv_blocks",
        "KVSCALER_DRAIN_TIMEOUT_SECONDS='nan'",
    ):
        assert part in words


def test_every_option_is_in_the_help_with_its_variable() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvscaler_sidecar.main", "serve", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"},
    )
    text = " ".join(done.stdout.split())
    for option in fields(Settings):
        assert f"--{option.name.replace('_', '-')}" in text
        assert variable_name(option.name) in text
    assert "examples:" in text


def test_own_limits_come_from_the_budget_and_the_settings(tmp_path: Path) -> None:
    settings = settings_for(
        tmp_path,
        limits={
            "charge": "PromptOnly",
            "mode": "Observe",
            "queue_requests": 3,
            "queue_bytes": 1000,
            "max_wait_seconds": 2.5,
            "watermark_percent": 10,
            "max_sequences": 5,
            "step_tokens": 64,
        },
    )
    plan = plan_start(settings, "float32")
    limits = plan.limits(200)
    assert limits.kv_blocks == 200
    assert limits.charge is ChargePolicy.PROMPT_ONLY
    assert limits.mode is AdmissionMode.OBSERVE
    assert (limits.queue_requests, limits.queue_bytes) == (3, 1000)
    assert limits.max_wait_seconds == 2.5
    assert limits.watermark_blocks == 20
    assert (limits.max_sequences, limits.step_tokens) == (5, 64)
    assert limits.max_request_tokens == 128


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"charge": "Free"}, "charge"),
        ({"queue_requests": -1}, "queue_requests"),
        ({"max_wait_seconds": "long"}, "max_wait_seconds"),
    ],
)
def test_limits_that_make_no_sense(tmp_path: Path, limits: dict[str, object], words: str) -> None:
    with pytest.raises(StartRefused, match=words):
        plan_start(settings_for(tmp_path, limits=limits), "float32")


def test_a_budget_that_does_not_fit_says_by_how_much(tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match=r"does not fit by .* (GiB|MiB)"):
        plan_start(settings_for(tmp_path, memory_bytes=str(GIB)), "float32")


def test_a_container_limit_below_the_budget_is_refused(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, memory_bytes=str(4 * GIB))
    plan_start(settings, "float32", 4 * GIB)
    with pytest.raises(StartRefused, match=r"memory limit of this container is 2\.00 GiB"):
        plan_start(settings, "float32", 2 * GIB)


def test_models_that_are_not_understood(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    folder = Path(settings.model_uri)
    (folder / "config.json").write_text('{"model_type": "mystery"}')
    with pytest.raises(StartRefused, match=r"config\.json"):
        plan_start(settings, "float32")
    (folder / "config.json").write_text("{")
    with pytest.raises(StartRefused, match=r"config\.json"):
        plan_start(settings, "float32")
    with pytest.raises(StartRefused, match="hf://some/model"):
        plan_start(settings_for(tmp_path, model_uri="hf://some/model"), "float32")
    with pytest.raises(StartRefused, match="KVSCALER_MODELS_DIR"):
        plan_start(
            settings_for(
                tmp_path, model_uri="builtin://smollm2-135m", models_dir=str(tmp_path / "none")
            ),
            "float32",
        )


def test_the_limit_of_the_control_group(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    assert container_memory_limit_bytes((limit,)) is None
    limit.write_text("max\n")
    assert container_memory_limit_bytes((limit,)) is None
    limit.write_text("1073741824\n")
    assert container_memory_limit_bytes((limit,)) == GIB
    limit.write_text("9223372036854771712\n")
    assert container_memory_limit_bytes((limit,)) is None


def test_a_refused_start_is_78_with_last_words_and_loads_nothing(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    words = tmp_path / "termination-log"
    words.touch()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvscaler_sidecar.main",
            f"--model-uri={settings.model_uri}",
            f"--memory-bytes={GIB}",
            "--compute-dtype=float32",
            f"--termination-log={words}",
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
    )
    assert done.returncode == 78
    assert "does not fit by" in words.read_text()
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert [line["message"] for line in lines] == ["refused to start"]
    assert "does not fit by" in lines[0]["why"]
    assert done.stdout == ""
