"""Changes in the words of the command line, so that they can be tried by pasting them."""

from collections.abc import Callable, Mapping

from kvscaler import hardware

_FLAGS: Mapping[str, tuple[str, Callable[[object], str]]] = {
    "accelerator": ("--accelerator", lambda x: _shortest_name(str(x))),
    "memory_mib": ("--memory", lambda x: f"{x}MiB"),
    "weights": ("--weight-dtype", str),
    "kv_dtype": ("--kv-dtype", str),
    "memory_utilization_percent": ("--memory-utilization", lambda x: f"{float(str(x)) / 100:g}"),
    "max_context_tokens": ("--max-model-len", str),
    "max_sequences": ("--max-num-seqs", str),
    "step_tokens": ("--max-num-batched-tokens", str),
    "tensor_parallel": ("--tensor-parallel", str),
    "pipeline_parallel": ("--pipeline-parallel", str),
    "data_parallel": ("--data-parallel", str),
}


def _shortest_name(accelerator: str) -> str:
    """The alias that is quickest to type, without spaces."""
    known = hardware.find(accelerator)
    names = [name for name in (known.name, *known.aliases) if " " not in name]
    return min(names, key=len)


def flags_of(settings: Mapping[str, object]) -> tuple[str, ...]:
    """`settings` of a change, each as a flag with its value; replicas are no flag of a plan of one."""
    return tuple(
        f"{flag} {write(settings[name])}"
        for name, (flag, write) in _FLAGS.items()
        if name in settings
    )
