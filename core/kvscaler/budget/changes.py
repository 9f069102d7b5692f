"""What another setting, type or card would give: alternatives, and the cheapest that make it fit.

Each change is the same budget computed again; nothing here has a formula of its own.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

from kvscaler.budget.compute import BudgetUnknown
from kvscaler.budget.demand import Demand, groups, held, smallest_fleet, with_room_for
from kvscaler.budget.deployment import Deployment
from kvscaler.budget.fit import SMALLEST_CONTEXT_TOKENS
from kvscaler.budget.lines import KVBudget, gib
from kvscaler.budget.questions import largest_context
from kvscaler.budget.version import Version
from kvscaler.hardware import Accelerator, accelerators
from kvscaler.models import ModelNotUnderstood
from kvscaler.models.kv_formats import kv_format
from kvscaler.models.quantization import parse_name

HIGHEST_UTILIZATION_PERCENT = 95
FEW_SEQUENCES = 64
FEW_STEP_TOKENS = 2048

KV_DTYPES: Mapping[str, tuple[str, ...]] = {
    "vllm-v0": ("fp8_e4m3",),
    "vllm-v1": ("fp8_e4m3", "int8_per_token_head"),
    "sglang": ("fp8_e4m3",),
    "tensorrt-llm": ("fp8_e4m3",),
    "lmdeploy": ("int8_per_token_head", "int4_per_token_head"),
    "tgi": ("fp8_e4m3",),
    "llama.cpp": ("q8_0", "q4_0"),
}
"""Smaller types of the cache that an engine offers: vLLM and SGLang `--kv-cache-dtype`, TensorRT-LLM
`KvCacheConfig.dtype`, LMDeploy `--quant-policy` 8 and 4 (scale and zero point per token and head), TGI
`--kv-cache-dtype`, llama.cpp `--cache-type-k`. Our own engine keeps keys and values as it computes."""

PER_TOKEN_HEAD = Version(0, 20, 0)
"""vLLM has `int8_per_token_head` from here on (pull request 38378, merged in spring 2026)."""

WEIGHT_SCHEMES: Mapping[str, tuple[str, ...]] = {
    "llama.cpp": ("gguf-q8_0", "gguf-q4_k_m"),
    "kvscaler-cpu": (),
    "kvscaler-cuda": (),
}
USUAL_SCHEMES = ("fp8", "int4-g128")

MEMORY_AS_STATED = ("cpu", "custom")
"""Devices whose memory is what a container's limit, or a person, says."""
MOST_MEMORY_MIB = 4 << 20

FIXED_FRACTION = ("sglang", "llama.cpp")
"""Engines whose fraction is not free to grow: what SGLang leaves is where activations and graphs live,
and llama.cpp has none."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a deployment and what it leads to."""

    name: str
    deployment: Deployment
    budget: KVBudget
    settings: Mapping[str, object]
    """What changed, by the names of `EngineSettings`, or `weights` (a scheme), `accelerator` (its
    name), `memory_mib`, `replicas`."""

    @property
    def sequences(self) -> float:
        """Sequences of the longest context that the changed pool holds."""
        return self.budget.layout.concurrency(self.budget.blocks, self.budget.max_context_tokens)

    @property
    def replicas(self) -> int:
        """Replicas alike that the change asks for."""
        found = self.settings.get("replicas", 1)
        return found if isinstance(found, int) else 1

    @property
    def devices(self) -> int:
        """Accelerators of all replicas."""
        return self.deployment.devices * self.replicas


def dtype_changes(deployment: Deployment) -> tuple[Change, ...]:
    """What other types of the cache and of the weights would give; none is chosen by itself."""
    found = (*_kv_changes(deployment, deployment), *_weight_changes(deployment, deployment))
    return tuple(change for change in found if change is not None)


def cheapest_changes(
    deployment: Deployment, demand: Demand | None = None, most: int = 3
) -> tuple[Change, ...]:
    """Up to `most` changes that make the deployment fit, and hold `demand`; the cheapest first.

    Order of cost: settings that cost nothing, the cache's precision, the weights' precision, more
    memory or a larger card, more devices, and last smaller weights on more devices; what takes fewer
    devices is listed first. Each is tried alone, beside the limits that `demand` needs anyway, and of
    one kind only the mildest that is enough is listed.
    Nothing is listed when it fits already.
    """
    if _meets(deployment, deployment.budget(), demand, 1):
        return ()
    found: list[Change] = []
    for kind in _candidates(deployment, demand):
        change = next((x for x in kind if x is not None and _change_meets(x, demand)), None)
        if change is not None and not any(_includes(change, cheaper) for cheaper in found):
            found.append(change)
        if len(found) == most:
            break
    return tuple(sorted(found, key=lambda change: change.devices))


def _includes(change: Change, cheaper: Change) -> bool:
    """Whether `change` is `cheaper` and something more."""
    return cheaper.settings.items() <= change.settings.items()


def _meets(deployment: Deployment, budget: KVBudget, demand: Demand | None, replicas: int) -> bool:
    if demand is None:
        return budget.fit.fits
    return held(deployment, budget, demand) * replicas >= demand.concurrency


def _change_meets(change: Change, demand: Demand | None) -> bool:
    return _meets(change.deployment, change.budget, demand, change.replicas)


def _candidates(asked: Deployment, demand: Demand | None) -> Iterator[Iterable[Change | None]]:
    """Changes by kind, of which the first that is enough counts; the cheapest kind first."""
    roomy = asked if demand is None else with_room_for(asked, demand)
    if roomy is not asked:
        yield [_attempt(asked, roomy, _limits(asked, roomy))]
    yield from ([change] for change in _free_changes(asked, roomy, demand))
    yield _kv_changes(asked, roomy)
    yield _weight_changes(asked, roomy)
    yield _more_memory(asked, roomy, demand)
    yield (
        _attempt(asked, replace(roomy, accelerator=card), card.name, accelerator=card.name)
        for card in _larger_cards(asked.accelerator)
    )
    yield from ([change] for change in _more_devices(asked, roomy, demand))
    for smaller in _weight_changes(asked, roomy):
        if smaller is not None:
            beside = smaller.settings["weights"]
            yield _more_devices(asked, smaller.deployment, demand, weights=beside)


def _limits(asked: Deployment, roomy: Deployment) -> str:
    words = []
    if roomy.settings.max_context_tokens != asked.settings.max_context_tokens:
        words.append(f"context of {roomy.settings.max_context_tokens} tokens")
    if roomy.settings.max_sequences != asked.settings.max_sequences:
        words.append(f"up to {roomy.settings.max_sequences} sequences")
    return ", ".join(words)


def _free_changes(
    asked: Deployment, roomy: Deployment, demand: Demand | None
) -> Iterator[Change | None]:
    """Settings that cost no precision and no hardware."""
    settings, present = roomy.settings, roomy.budget()
    if asked.profile.name not in FIXED_FRACTION and settings.kv_cache_bytes is None:
        for percent in range(int(present.utilization_percent) + 1, HIGHEST_UTILIZATION_PERCENT + 1):
            fuller = roomy.changed(memory_utilization_percent=float(percent))
            change = _attempt(asked, fuller, f"memory utilization {percent}%")
            if change is not None and _change_meets(change, demand):
                yield change
                break
    few = max(FEW_SEQUENCES, demand.concurrency if demand else 1)
    if (settings.max_sequences or present.max_sequences) > few:
        yield _attempt(asked, roomy.changed(max_sequences=few), f"at most {few} sequences")
    if present.step_tokens > FEW_STEP_TOKENS:
        shorter = roomy.changed(step_tokens=FEW_STEP_TOKENS)
        yield _attempt(asked, shorter, f"steps of {FEW_STEP_TOKENS} tokens")
    longest = largest_context(present, asked.model, 1)
    longest -= longest % present.block_tokens
    needed = demand.tokens if demand else SMALLEST_CONTEXT_TOKENS
    if needed <= longest < present.max_context_tokens:
        shorter = roomy.changed(max_context_tokens=longest)
        yield _attempt(asked, shorter, f"context of {longest} tokens")


def _kv_changes(asked: Deployment, roomy: Deployment) -> Iterator[Change | None]:
    present = kv_format(roomy.budget().kv_dtype)
    for name in _offered_kv_dtypes(asked):
        if kv_format(name).element_bytes < present.element_bytes:
            yield _attempt(asked, roomy.changed(kv_dtype=name), f"KV cache in {name}")


def _offered_kv_dtypes(asked: Deployment) -> tuple[str, ...]:
    offered = KV_DTYPES.get(asked.profile.name, ())
    version = getattr(asked.profile, "version", None)
    if asked.profile.name == "vllm-v1" and version is not None and version < PER_TOKEN_HEAD:
        return tuple(name for name in offered if not name.endswith("per_token_head"))
    return offered


def _weight_changes(asked: Deployment, roomy: Deployment) -> Iterator[Change | None]:
    if asked.model.quantization is not None:
        return
    for scheme in WEIGHT_SCHEMES.get(asked.profile.name, USUAL_SCHEMES):
        yield _attempt(asked, quantized(roomy, scheme), f"weights in {scheme}", weights=scheme)


def _more_devices(
    asked: Deployment, roomy: Deployment, demand: Demand | None, **beside: object
) -> Iterator[Change | None]:
    """More replicas where one holds some of the demand, and the smallest larger replica."""
    found: list[Change] = []
    if demand is not None:
        fleet = smallest_fleet(replace(roomy, settings=asked.settings), demand)
        if fleet is not None and fleet.replicas > 1:
            words = f"{fleet.replicas} replicas of {_devices(fleet.deployment)}"
            change = _attempt(asked, fleet.deployment, words, replicas=fleet.replicas, **beside)
            found += [change] if change else []
    for grown in groups(roomy):
        if grown.devices <= asked.devices:
            continue
        change = _attempt(asked, grown, _devices(grown), **beside)
        if change is not None and _change_meets(change, demand):
            found.append(change)
            break
    yield from sorted(found, key=lambda change: change.devices)


def _more_memory(
    asked: Deployment, roomy: Deployment, demand: Demand | None
) -> Iterator[Change | None]:
    """The least memory that is enough, where memory is a limit or stated, not a card's."""
    present = asked.accelerator.memory_bytes
    if present is None or asked.accelerator.name not in MEMORY_AS_STATED:
        return

    def with_mib(mib: int) -> Change | None:
        device = asked.accelerator.with_memory(mib << 20)
        words = f"memory of {gib(mib << 20)}"
        return _attempt(asked, replace(roomy, accelerator=device), words, memory_mib=mib)

    low, high = (present >> 20) + 1, MOST_MEMORY_MIB
    while low < high:
        middle = (low + high) // 2
        change = with_mib(middle)
        enough = change is not None and _change_meets(change, demand)
        low, high = (low, middle) if enough else (middle + 1, high)
    yield with_mib(low)


def _devices(deployment: Deployment) -> str:
    return f"{deployment.devices} device{'s' if deployment.devices > 1 else ''}"


def _larger_cards(card: Accelerator) -> list[Accelerator]:
    """Known cards of the same kind with more memory, the smallest first."""
    if card.device == "cpu":
        return []
    alike = (x for x in accelerators() if (x.device, x.unified) == (card.device, card.unified))
    least = card.memory_bytes or 0
    return sorted(
        (x for x in alike if (x.memory_bytes or 0) > least), key=lambda x: x.memory_bytes or 0
    )


def _attempt(asked: Deployment, changed: Deployment, words: str, **beside: object) -> Change | None:
    """The change, unless the engine or the model can't be computed under it."""
    settings = {
        field.name: value
        for field in fields(changed.settings)
        if (value := getattr(changed.settings, field.name)) != getattr(asked.settings, field.name)
    }
    try:
        return Change(words, changed, changed.budget(), settings | beside)
    except (BudgetUnknown, ModelNotUnderstood):
        return None


def quantized(deployment: Deployment, scheme: str) -> Deployment:
    """The same with weights in `scheme`; what was learned of the present weights does not apply."""
    model = replace(deployment.model, quantization=parse_name(scheme), stored_bytes=None)
    return replace(deployment, model=model, calibration=None)
