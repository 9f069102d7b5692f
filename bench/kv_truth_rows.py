"""Rows of public start-up logs as inputs: which model, card, engine and settings, and nothing else.

What an engine printed is an answer, never an input; `printed` is read by the comparison only. What a
row leaves open (`"24GB class"`, `"v1 (2025-10)"`) is read by rules that hold for any row.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvscaler import hardware
from kvscaler.budget import EngineProfile, EngineSettings, profile_for
from kvscaler.budget.version import Version
from kvscaler.hardware import Accelerator
from kvscaler.models import LayerKind, ModelArchitecture, ModelNotUnderstood

GIB = 1 << 30
FACTS = Path(__file__).with_name("kv_truth_facts.json")
META = ("config_key", "used_by_rows", "source", "verified", "kv_class", "note", "head_dim_derived")
CLASSES = {
    16: (15.7, 14.6, 15.9), 24: (23.5, 22.0, 24.2), 32: (31.4, 31.3, 31.9), 40: (39.4, 39.1, 39.6),
    48: (44.5, 44.2, 47.6), 64: (63.9, 61.0, 64.0), 80: (79.2, 79.1, 79.7), 96: (95.0, 93.0, 95.6),
}  # fmt: skip
"""GiB of a card of which only the class is known: usual, smallest and largest of the data file."""
RELEASES = (
    ("2023-09", "0.2.0"), ("2024-04", "0.4.0"), ("2024-08", "0.5.5"), ("2024-11", "0.6.4"),
    ("2025-02", "0.7.3"), ("2025-04", "0.8.5"), ("2025-06", "0.9.1"), ("2025-08", "0.10.1"),
    ("2025-10", "0.11.0"), ("2025-12", "0.12.0"), ("2026-01", "0.14.0"), ("2026-02", "0.16.0"),
    ("2026-03", "0.18.0"), ("2026-04", "0.20.0"), ("2026-05", "0.22.0"), ("2026-06", "0.23.0"),
    ("2026-07", "0.25.0"), ("2026-08", "0.27.0"), ("2026-11", "0.33.0"),
)  # fmt: skip
"""vLLM's newest release in a month (github.com/vllm-project/vllm/releases)."""
TRT_RELEASES = (
    ("2024-01", "0.7.1"), ("2024-11", "0.15.0"), ("2025-06", "0.20.0"), ("2025-10", "1.0.0"),
)  # fmt: skip
"""TensorRT-LLM's (github.com/NVIDIA/TensorRT-LLM/releases)."""
DEVELOPMENT = ((8000, "0.10.1"), (15800, "0.21.0"))
"""Builds of an untagged clone count commits: 0.1.dev8475 is of August 2025, 0.1.dev15917 of April 2026."""


@dataclass(frozen=True)
class Case:
    """One row, ready to be predicted."""

    row: Mapping[str, Any]
    model: ModelArchitecture
    profile: EngineProfile
    settings: EngineSettings
    accelerator: Accelerator | None
    stated: bool
    """Card stated or read from the log, utilization printed or the version's default, a version."""


def read(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def left_out(row: Mapping[str, Any], config: Mapping[str, Any] | None) -> str | None:
    """Why a row says nothing about an accuracy, by the rules of the data's README."""
    if row.get("util_suspect"):
        return "util_suspect"
    if row["printed"].get("approximate"):
        return "approximate figures"
    if row.get("check_independent") is False:
        return "check not independent"
    if config is None or "UNVERIFIED" in str(config.get("verified")):
        return "configuration not verified"
    return None


def architecture(row: Mapping[str, Any], config: Mapping[str, Any]) -> ModelArchitecture:
    """The row's model. Raises `ModelNotUnderstood`."""
    known = json.loads(FACTS.read_text("utf-8"))
    facts = {k: v for k, v in config.items() if k not in META and not k.endswith("_head")}
    facts |= known["models"].get(config["config_key"], {}).get("facts", {})
    facts |= _quantization(row, known["quantization"])
    if row["config_key"] == "inference-sim:llama-3.1-70b-instruct" and "Llama-2" in row["model"]:
        facts |= {"vocab_size": 32000, "intermediate_size": 28672}
    if row["engine"] != "llama.cpp" and _dtype(row):
        facts["torch_dtype"] = _dtype(row)
    return ModelArchitecture.from_config(facts)


def _dtype(row: Mapping[str, Any]) -> str | None:
    name = row.get("weight_dtype") or ""
    return {"fp16": "float16", "float16": "float16"}.get(name)


def launch_flags(row: Mapping[str, Any]) -> dict[str, Any]:
    """Flags that the source's own launch command states and the row leaves out."""
    known = json.loads(FACTS.read_text("utf-8"))["launches"]
    found = [entry["flags"] for entry in known if entry["source"] in row["source"]]
    return dict(found[0]) if found else {}


def _quantization(row: Mapping[str, Any], known: list[dict[str, str]]) -> dict[str, str]:
    name, dtype = row["model"], (row.get("weight_dtype") or "").lower()
    for entry in known:
        parts = (*entry["scheme"].split("-"), "modelslim")
        agrees = not dtype or any(part in dtype for part in parts)
        if entry["model"].lower() in name.lower() and agrees:
            return {"quantization": entry["scheme"], "quantization_skips": entry["skips"]}
    if dtype.startswith("gguf"):
        return {"quantization": dtype}
    text = f"{dtype} {name}".lower()
    for pattern, scheme in (
        (r"modelopt_mixed", "nvfp4-mixed"), (r"nvfp4", "nvfp4"), (r"mxfp4", "mxfp4"), (r"gptq", "gptq-g128"),
        (r"w4a8", "int4-g256"), (r"w8a8|modelslim|^int8", "int8"),
        (r"awq", "awq-g128"), (r"int4|w4a16|autoround", "int4-g128"), (r"fp8", "fp8"),
    ):  # fmt: skip
        if re.search(pattern, text) and not dtype.startswith(("bf", "bfloat", "fp16", "float16")):
            return {"quantization": scheme}
    return {}


def version_of(row: Mapping[str, Any]) -> tuple[Version | None, bool]:
    """The engine's version, and whether the row states it with a number."""
    text = row.get("engine_version") or ""
    if build := re.search(r"0\.1\.dev(\d+)", text):
        number = [name for least, name in DEVELOPMENT if int(build[1]) >= least]
        return Version.parse(number[-1] if number else "0.8.0"), False
    plain = re.sub(r"^v[01]\b|20\d\d-\d\d(-\d\d)?|\d\.\d+x", " ", text).replace(".x", ".9")
    plain = re.sub(r"[\d.]+\s?-\s?(\d+\.\d+)", r"\1", plain)
    found = Version.parse(plain)
    if found is not None:
        return found, True
    if "0.1x" in text and not re.search(r"20\d\d", text):
        return Version(0, 15, 0), False
    if date := re.search(r"20\d\d-\d\d", text):
        releases = TRT_RELEASES if row["engine"] == "trtllm" else RELEASES
        names = [name for month, name in releases if month <= date[0]]
        return Version.parse(names[-1] if names else releases[0][1]), False
    return None, False


def accelerator_of(row: Mapping[str, Any]) -> Accelerator | None:
    """The row's card, `None` when it says nothing of it."""
    text = row.get("gpu")
    if not text:
        return None
    plain = re.sub(r"\(.*", "", text).strip()
    for name in (text, plain):
        try:
            found = hardware.find(name)
        except hardware.UnknownAccelerator:
            continue
        if found.memory_bytes is None:
            return None
        split = row["engine"] == "llama.cpp" and (row.get("gpu_count") or 1) > 1
        return found.with_memory(found.memory_bytes * row["gpu_count"]) if split else found
    if total := re.search(r"\((\d+\.\d+) GiB\)", text):
        return hardware.custom(round(float(total[1]) * GIB))
    if size := re.search(r"(\d+)GB.?class", text):
        usual, least, most = (round(part * GIB) for part in CLASSES[int(size[1])])
        return replace(hardware.custom(usual), memory_range_bytes=(least, most))
    return None


def case_of(row: Mapping[str, Any], config: Mapping[str, Any], *, rows_only: bool = False) -> Case:
    """Everything that a prediction needs. Raises `ModelNotUnderstood` or `UnknownEngine`.

    `rows_only`: without the launch flags of the source, which the row leaves out.
    """
    version, numbered = version_of(row)
    device = accelerator_of(row)
    engine = {"aphrodite": "vllm", "trtllm": "TensorRTLLM", "llama.cpp": "LlamaCpp"}.get(
        row["engine"], row["engine"]
    )
    if row["engine"] == "aphrodite":
        version = Version(0, 3, 0)
    shown = f"{engine}@{version}" if version else engine
    profile = profile_for(shown, device or hardware.find("h100"))
    model = architecture(row, config)
    basis = row.get("gpu_basis") or ""
    stated = (
        numbered
        and device is not None
        and (basis == "stated" or basis.startswith(("log", "total")))
        and (row.get("util") is not None or row["engine"] == "vllm")
    )
    settings = replace(_settings(row, model), **({} if rows_only else launch_flags(row)))
    return Case(row, model, profile, settings, device, stated)


def given_outright(row: Mapping[str, Any]) -> int | None:
    """The pool that the flag `kv_cache_memory_bytes` asked for, where a row says that it was used."""
    if "kv_cache_memory_bytes override" in (row.get("note") or ""):
        return round(row["printed"]["kv_gib"] * GIB)
    return None


def _spread_attention(row: Mapping[str, Any], model: ModelArchitecture) -> bool:
    """Whether attention is data-parallel where a row says nothing of it.

    SGLang's documentation starts DeepSeek on 16 Ascend dies and more with `--enable-dp-attention` and
    `--moe-a2a-backend deepep` without exception (docs/platforms/ascend_npu_deepseek_example.md), and
    decodes with a replica on each.
    """
    latent = any(group.kind is LayerKind.MLA for group in model.groups)
    ascend = "ascend" in (row.get("gpu") or "").lower()
    return latent and ascend and (row.get("tp") or 1) >= 16 and not row.get("attn_tp_inferred")


def _replicas(row: Mapping[str, Any], attention: int | None) -> int:
    return (row["tp"] // attention) if attention else (row.get("dp") or 1)


def _settings(row: Mapping[str, Any], model: ModelArchitecture) -> EngineSettings:
    speculative = row.get("speculative") or {}
    uses_mtp = speculative.get("method") == "mtp"
    kv_dtype = row.get("kv_cache_dtype") or "auto"
    attention = row.get("attn_tp_inferred")
    spread = row["engine"] == "sglang" and _spread_attention(row, model)
    return EngineSettings(
        memory_utilization_percent=100 * row["util"] if row.get("util") else None,
        max_context_tokens=row.get("max_model_len"),
        max_sequences=row.get("max_num_seqs"),
        step_tokens=row.get("max_num_batched_tokens"),
        block_tokens=row.get("block_size"),
        compute_dtype="Auto",
        kv_dtype=kv_dtype.split(" ")[0],
        tensor_parallel=row.get("tp") or 1,
        pipeline_parallel=row.get("pp") or 1,
        data_parallel=row["tp"] if spread else _replicas(row, attention),
        expert_parallel=spread,
        data_parallel_head=spread,
        context_parallel=row.get("dcp") or 1,
        speculative_tokens=int(speculative.get("n") or 0),
        draft_layers=model.prediction_layers if uses_mtp else 0,
        prefix_caching=row.get("prefix_caching"),
        cuda_graphs=False if row.get("enforce_eager") else None,
        kv_cache_bytes=given_outright(row),
    )


__all__ = [
    "GIB",
    "Case",
    "ModelNotUnderstood",
    "case_of",
    "given_outright",
    "launch_flags",
    "left_out",
    "read",
]
