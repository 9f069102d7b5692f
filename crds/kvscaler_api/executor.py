"""What a service's engine is told about its executor: which one, and what it computes in.

They are arguments of our engine, not fields of their own: a service that is dry-run with `Modelled`
stays the service that it will be, and only its `engine.args` change.
"""

from collections.abc import Iterator

from kvscaler.budget.settings import AUTO, CPU_COMPUTE_DTYPES
from kvscaler.protocol.state import ExecutorType

from kvscaler_api.engine import EngineType
from kvscaler_api.service import InferenceServiceSpec
from kvscaler_api.template import engine_settings, objects

EXECUTOR = "executor"
COMPUTE_DTYPE = "compute-dtype"


def is_modelled(spec: InferenceServiceSpec) -> bool:
    """Whether replicas take the step times of the accelerator and compute nothing."""
    return _last_named(spec, EXECUTOR) == ExecutorType.MODELLED


def wanted_compute_dtype(spec: InferenceServiceSpec) -> str | None:
    """What replicas are told to compute in; `None` where each chooses for the CPU that it finds."""
    asked = _last_named(spec, COMPUTE_DTYPE)
    return None if asked in (None, AUTO) else asked


def option_faults(spec: InferenceServiceSpec) -> Iterator[str]:
    """Values of these options that our engine would refuse to start with."""
    if spec.engine.type is not EngineType.KVSCALER:
        return
    for place, name in _named(spec, EXECUTOR):
        if name not in set(ExecutorType):
            yield f"{place} {name!r}: there is no such executor; use {' or '.join(ExecutorType)}"
    for place, name in _named(spec, COMPUTE_DTYPE):
        if name not in CPU_COMPUTE_DTYPES:
            words = ", ".join(CPU_COMPUTE_DTYPES)
            yield f"{place} {name!r}: our engine does not compute in it; use one of {words}"


def _last_named(spec: InferenceServiceSpec, option: str) -> str | None:
    if spec.engine.type is not EngineType.KVSCALER:
        return None
    asked = [name for _, name in _named(spec, option)]
    return asked[-1] if asked else None


def _named(spec: InferenceServiceSpec, option: str) -> Iterator[tuple[str, str]]:
    """(place, value) of each time that an option is given; the last one counts."""
    variable = f"KVSCALER_{option.upper().replace('-', '_')}"
    for entry in objects(engine_settings(spec.template).get("env")):
        if entry.get("name") == variable and entry.get("value"):
            yield f"spec.template: env {variable} of the engine's container", str(entry["value"])
    arguments = iter(enumerate(spec.engine.args))
    for index, argument in arguments:
        flag, equals, name = argument.partition("=")
        if flag != f"--{option}":
            continue
        if not equals:
            _, name = next(arguments, (index, ""))
        yield f"spec.engine.args[{index}] --{option}", name
