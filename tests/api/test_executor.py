"""A service is dry-run by its engine's arguments alone: what they say, and what follows from it."""

from typing import Any

import pytest
from kvscaler_api.conflicts import argument_conflicts, template_conflicts
from kvscaler_api.executor import is_modelled, wanted_compute_dtype
from kvscaler_api.implemented import not_implemented
from kvscaler_api.service import InferenceServiceSpec, read_service

LLAMA = {"uri": "hf://meta-llama/Llama-3.1-8B-Instruct"}


def spec(changed: Any, patch: dict[str, Any]) -> InferenceServiceSpec:
    return read_service(changed(patch)).spec


def by_environment(value: str) -> dict[str, Any]:
    env = [{"name": "KVSCALER_EXECUTOR", "value": value}]
    return {"spec": {"containers": [{"name": "engine", "env": env}]}}


@pytest.mark.parametrize(
    ("args", "modelled"),
    [
        ([], False),
        (["--executor=Modelled"], True),
        (["--executor", "Modelled", "--time-scale=2"], True),
        (["--executor=Modelled", "--executor=Torch"], False),
        (["--log-level", "--executor=Modelled"], True),
        (["--executor"], False),
        (["--executors=Modelled"], False),
    ],
)
def test_the_last_argument_that_names_an_executor_counts(
    changed: Any, args: list[str], modelled: bool
) -> None:
    assert is_modelled(spec(changed, {"engine": {"args": args}})) is modelled


def test_an_argument_wins_over_the_environment(changed: Any) -> None:
    template = by_environment("Modelled")
    assert is_modelled(spec(changed, {"template": template}))
    torch = {"args": ["--executor=Torch"]}
    assert not is_modelled(spec(changed, {"template": template, "engine": torch}))


def test_another_engine_is_never_modelled(changed: Any) -> None:
    engine = {"type": "VLLM", "args": ["--executor=Modelled"]}
    assert not is_modelled(spec(changed, {"engine": engine}))
    engine = {"type": "VLLM", "args": ["--executor=ray"]}
    assert argument_conflicts(spec(changed, {"engine": engine})) == ()


def test_an_executor_that_there_is_not_is_refused_with_its_place(changed: Any) -> None:
    assert argument_conflicts(spec(changed, {"engine": {"args": ["--executor=Modeled"]}})) == (
        "spec.engine.args[0] --executor 'Modeled': there is no such executor; use Torch or"
        " Modelled",
    )
    (words,) = argument_conflicts(spec(changed, {"template": by_environment("torch")}))
    assert words.startswith("spec.template: env KVSCALER_EXECUTOR of the engine's container")


@pytest.mark.parametrize(
    ("args", "dtype"),
    [
        ([], None),
        (["--compute-dtype=Auto"], None),
        (["--compute-dtype=float32"], "float32"),
        (["--compute-dtype", "bfloat16", "--threads=1"], "bfloat16"),
    ],
)
def test_a_compute_dtype_may_be_asked_for(changed: Any, args: list[str], dtype: str | None) -> None:
    service = spec(changed, {"engine": {"args": args}})
    assert wanted_compute_dtype(service) == dtype
    assert argument_conflicts(service) == ()


def test_a_compute_dtype_that_our_engine_has_not_is_refused_with_its_place(changed: Any) -> None:
    asked = {"engine": {"args": ["--threads=1", "--compute-dtype=int4"]}}
    assert argument_conflicts(spec(changed, asked)) == (
        "spec.engine.args[1] --compute-dtype 'int4': our engine does not compute in it; use one of"
        " Auto, float32, bfloat16",
    )
    # Of another engine's arguments nothing is known.
    asked["engine"]["type"] = "VLLM"
    service = spec(changed, asked)
    assert argument_conflicts(service) == () and wanted_compute_dtype(service) is None


def test_what_is_modelled_needs_no_model_files(changed: Any) -> None:
    modelled = {"args": ["--executor=Modelled"]}
    assert not_implemented(spec(changed, {"model": LLAMA, "engine": modelled})) == ()
    assert not_implemented(spec(changed, {"model": LLAMA})) == ("spec.model.uri",)
    elsewhere = {"uri": "s3://bucket/model"}
    found = not_implemented(spec(changed, {"model": elsewhere, "engine": modelled}))
    assert found == ("spec.model.uri",)


def test_what_is_modelled_needs_no_accelerator_of_the_node(changed: Any) -> None:
    resources = {"limits": {"nvidia.com/gpu": "2"}}
    patch = {
        "accelerator": {"name": "nvidia-h100-80gb-hbm3", "resourceName": "nvidia.com/gpu"},
        "template": {"spec": {"containers": [{"name": "engine", "resources": resources}]}},
    }
    assert len(template_conflicts(spec(changed, patch))) == 1
    patch["engine"] = {"args": ["--executor=Modelled"]}
    (words,) = template_conflicts(spec(changed, patch))
    assert "the executor Modelled takes no nvidia.com/gpu" in words
