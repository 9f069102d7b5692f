"""Modelled replicas: how fast they are by their model, and whether the run was true to it.

A run of synthetic replicas proves something only if nothing but the model set their pace: so the
verdict looks at the steps that they took, at the stream of chunks, and at the client itself.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvscaler.performance import RequestWork, StepTimeModel, step_time_on
from kvscaler.protocol.state import ExecutorType
from kvscaler.scaling.capacity import replica_capacity
from kvscaler_operator.assess import Assessment, admission_policy, assess
from kvscaler_operator.validate import read
from kvscaler_sidecar.config import parse_arguments
from kvscaler_sidecar.executors.synthetic import BYTES_PER_TOKEN

from hack.demo.observe import Sample
from hack.demo.report import Check, Phase
from hack.demo.traffic import WORDS, Request, Shape
from hack.demo.view import quantile

PACE_TOLERANCE = 1.1
"""Steps may take this much longer than the model says before the run is called bound by the CPU."""
LAG_SECONDS = 0.1
MOST_LAG_SECONDS = 0.5
CHUNK_BIN_SECONDS = 5.0
_HALVINGS = 60


class NotModelledError(Exception):
    """The service's object gives no modelled replica: the words say why."""


@dataclass(frozen=True, slots=True)
class Card:
    """A modelled replica as its object describes it; `model` has its times as they show."""

    blocks: int
    usable_blocks: int
    block_tokens: int
    time_scale: float
    model: StepTimeModel


def card_of(example: dict[str, Any]) -> Card:
    """The replica that the operator and the sidecar make of this object."""
    metadata = {**example["metadata"], "uid": "demo", "namespace": "demo"}
    service, fault = read({**example, "metadata": metadata})
    if service is None or fault is not None:
        raise NotModelledError(fault.message if fault else "the object can't be read")
    found: Assessment = assess(service.spec, None, None)
    if found.budget is None or found.architecture is None or found.accelerator is None:
        raise NotModelledError(str(found.obstacle or found.awaiting))
    settings = parse_arguments(
        [*service.spec.engine.args, f"--model-uri={service.spec.model.uri}", "--memory-bytes=1"]
    )
    if settings.executor is not ExecutorType.MODELLED:
        raise NotModelledError(f"spec.engine.args name the executor {settings.executor}")
    budget = found.budget
    model = step_time_on(
        found.architecture, found.accelerator, budget.compute_dtype, budget.kv_dtype
    )
    capacity = replica_capacity(budget, admission_policy(service.spec))
    return Card(
        budget.blocks,
        capacity.usable_blocks,
        budget.block_tokens,
        settings.time_scale,
        StepTimeModel.from_costs(model.costs(settings.time_scale), model.source),
    )


def work_of(shape: Shape) -> RequestWork:
    """Moments of the requests: lengths are uniform, and a prompt's tokens follow its words."""
    per_word = (sum(map(len, WORDS)) / len(WORDS) + 1) / BYTES_PER_TOKEN
    (short, long), (least, most) = shape.prompt_words, shape.output_tokens
    prompt, prompt_square = _uniform(short * per_word, long * per_word)
    output, output_square = _uniform(least, most)
    return RequestWork(prompt, prompt_square, output, output_square, prompt * output)


def _uniform(low: float, high: float) -> tuple[float, float]:
    """First and second moment."""
    return (low + high) / 2, (low * low + low * high + high * high) / 3


def modelled_speed(card: Card, shape: Shape) -> dict[str, float]:
    """Rates of one replica whose usable blocks are full, by Little's law and the step-time model."""
    work, model = work_of(shape), card.model
    tokens = card.usable_blocks * card.block_tokens
    low, high = 0.0, 1.0 / model.work_seconds(work)
    for _ in range(_HALVINGS):
        rate = (low + high) / 2
        used = rate * model.kv_token_seconds(work, min(0.999, rate * model.work_seconds(work)))
        low, high = (rate, high) if used < tokens else (low, rate)
    busy = low * model.work_seconds(work)
    return {
        "requests_per_second_that_fill_one_replica": low,
        "requests_per_second": low,
        "output_tokens_per_second": low * work.output_mean_tokens,
        "time_per_output_token_seconds": model.time_per_output_token_seconds(busy),
        "request_seconds": model.residence_seconds(work, busy),
        "utilization": busy,
        "time_scale": card.time_scale,
    }


@dataclass(slots=True)
class ClientLag:
    """How late this process's event loop wakes up: a late client would hold streams up."""

    seconds: list[float] = field(default_factory=list)

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            due = time.monotonic() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self.seconds.append(max(0.0, time.monotonic() - due))

    @property
    def p99(self) -> float | None:
        """The 99th percentile, `None` before the first."""
        return quantile(self.seconds, 0.99)


def chunks_per_second(requests: Iterable[Request]) -> float:
    """The most chunks a second that clients received, over a few seconds."""
    bins: Counter[int] = Counter()
    for request in requests:
        if request.first_token_seconds is None:
            continue
        at = request.offered_at + request.first_token_seconds
        bins[int(at / CHUNK_BIN_SECONDS)] += 1
        for gap in request.token_gaps_seconds:
            at += gap
            bins[int(at / CHUNK_BIN_SECONDS)] += 1
    return max(bins.values(), default=0) / CHUNK_BIN_SECONDS


def paces(samples: Sequence[Sample], phase: Phase, card: Card) -> list[float]:
    """How long steps took against what the model says, of every look at a replica in `phase`."""
    return [
        pod.state["step_costs"]["base_seconds"] / card.model.base_seconds
        for sample in samples
        if phase.begin <= sample.at < phase.end
        for pod in sample.pods
        if pod.state and pod.state.get("step_costs") and pod.state["traffic"]["steps"]
    ]


def check_model(
    samples: Sequence[Sample],
    requests: Sequence[Request],
    spike: Phase,
    card: Card,
    lag: ClientLag,
    most_chunks: float,
) -> list[Check]:
    """Conditions under which a modelled run says something about the card."""
    seen = {
        (s["executor"]["type"], s["executor"]["time_scale"], (s["capacity"] or {}).get("kv_blocks"))
        for sample in samples
        for s in (pod.state for pod in sample.pods)
        if s and s["ready"]
    }
    wanted = (ExecutorType.MODELLED.value, card.time_scale, card.blocks)
    said = {
        ((sample.service or {}).get("status") or {}).get("executor", {}).get("type")
        for sample in samples[-1:]
    }
    pace = quantile(paces(samples, spike, card), 0.9)
    chunks = chunks_per_second(requests)
    return [
        Check(f"every replica was Modelled, at time scale {card.time_scale:g}, "
              f"with {card.blocks} blocks, and status says so",
              seen == {wanted} and said == {wanted[0]}, f"{sorted(seen, key=str)}, {said}"),
        Check(f"nine looks in ten saw steps of at most {PACE_TOLERANCE} x the modelled time",
              pace is not None and pace <= PACE_TOLERANCE,
              "never seen" if pace is None else f"{pace:.3f} x"),
        Check(f"the fleet emitted at most {most_chunks:.0f} chunks a second",
              0 < chunks <= most_chunks, f"{chunks:.0f} a second"),
        Check(f"the client's event loop was at most {MOST_LAG_SECONDS} s late (99 of 100)",
              lag.p99 is not None and lag.p99 <= MOST_LAG_SECONDS,
              "never seen" if lag.p99 is None else f"{lag.p99:.3f} s"),
    ]  # fmt: skip
