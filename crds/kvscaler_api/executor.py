"""Which executor a service's engine is told to run: what is modelled needs no accelerator.

The executor is an argument of our engine, not a field of its own: a service that is dry-run with
`Modelled` stays the service that it will be, and only its `engine.args` change.
"""

from collections.abc import Iterator

from kvscaler.protocol.state import ExecutorType

from kvscaler_api.engine import EngineType
from kvscaler_api.service import InferenceServiceSpec
from kvscaler_api.template import engine_settings, objects

FLAG = "--executor"
VARIABLE = "KVSCALER_EXECUTOR"


def is_modelled(spec: InferenceServiceSpec) -> bool:
    """Whether replicas take the step times of the accelerator and compute nothing."""
    if spec.engine.type is not EngineType.KVSCALER:
        return False
    asked = [name for _, name in named_executors(spec)]
    return bool(asked) and asked[-1] == ExecutorType.MODELLED


def named_executors(spec: InferenceServiceSpec) -> Iterator[tuple[str, str]]:
    """(place, name) of each time that an executor is named; the last one counts."""
    for entry in objects(engine_settings(spec.template).get("env")):
        if entry.get("name") == VARIABLE and entry.get("value"):
            yield f"spec.template: env {VARIABLE} of the engine's container", str(entry["value"])
    arguments = iter(enumerate(spec.engine.args))
    for index, argument in arguments:
        flag, equals, name = argument.partition("=")
        if flag != FLAG:
            continue
        if not equals:
            _, name = next(arguments, (index, ""))
        yield f"spec.engine.args[{index}] {FLAG}", name
