"""`/metrics` and `/state` give the same facts, in families that Prometheus' own parser accepts."""

import asyncio
from pathlib import Path

from kvscaler.protocol.metrics import (
    STATE_METRICS,
    cumulative_buckets,
    samples,
)
from kvscaler.protocol.state import Histogram, ReplicaState
from prometheus_client.parser import text_string_to_metric_families

from tests.sidecar.replicas import ParrotExecutor, running, state_and_metrics_under_load

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: str) -> Series:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def expected(state: ReplicaState) -> Series:
    series: Series = {}
    for sample in samples(state):
        labels = tuple(sorted(sample.labels.items()))
        if isinstance(sample.value, Histogram):
            name = sample.metric.name
            for bound, count in cumulative_buckets(sample.value):
                series[f"{name}_bucket", (("le", bound),)] = count
            series[f"{name}_sum", ()] = sample.value.sum_seconds
            series[f"{name}_count", ()] = float(sum(sample.value.counts))
        else:
            series[sample.metric.name, labels] = sample.value
    return series


async def test_state_and_metrics_agree_under_load(tmp_path: Path) -> None:
    state, text = await state_and_metrics_under_load(tmp_path)
    found = parse(text)
    wanted = expected(state)
    assert {key: found.get(key) for key in wanted} == wanted
    assert state.traffic.arrivals == 13
    assert state.traffic.refused["ContextTooLong"] == 1
    assert state.traffic.admitted + state.traffic.refused.get("QueueFull", 0) == 13
    assert found["kvscaler_cache_config_info", (("block_size", "4"), ("num_gpu_blocks", "24"))] == 1
    assert sum(v for (name, _), v in found.items() if name == "kvscaler_kv_blocks") == 24
    executors = [labels for (name, labels) in found if name == "kvscaler_executor_info"]
    assert ("type", "Parrot") in executors[0]


async def test_the_counters_add_up_after_a_run(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        for output in (3, 5):
            assert (await replica.complete("abcd", max_tokens=output)).status_code == 200
        state = await replica.until(lambda s: s.traffic.finished == 2)
        text = await replica.metrics()
    traffic = state.traffic
    assert traffic.finished_prompt_tokens == 8
    assert traffic.finished_output_tokens == 8
    assert traffic.finished_output_tokens_squared == 34
    assert traffic.finished_prompt_output_tokens == 32
    assert traffic.arrival_max_tokens == 8
    assert sum(traffic.time_to_first_token.counts) == 2
    assert sum(traffic.time_per_output_token.counts) == 2
    assert sum(traffic.queue_wait.counts) == 2
    assert traffic.finished_block_seconds > 0
    found = parse(text)
    assert found["kvscaler_inter_token_latency_seconds_count", ()] == 6
    assert found["kvscaler_end_to_end_latency_seconds_count", ()] == 2
    assert found["kvscaler_output_length_tokens_sum", ()] == 8
    assert found["kvscaler_prompt_length_tokens_bucket", (("le", "4.0"),)] == 2


async def test_capacity_and_budget_are_reported_as_counted_and_as_predicted(tmp_path: Path) -> None:
    async with running(tmp_path, ParrotExecutor(kv_blocks=40)) as replica:
        state = await replica.state()
    assert state.capacity is not None
    assert state.capacity.kv_blocks == 40
    assert state.capacity.pool_bytes == 40 * 1024
    assert state.capacity.weight_bytes == 12345
    assert (
        state.capacity.predicted_weight_bytes
        == {line.name: line.bytes for line in state.budget}["weights"]
    )
    assert state.capacity.predicted_kv_blocks > 1000
    assert state.model.served_names == ("parrot",)
    assert state.model.facts["num_hidden_layers"] == 30
    assert len(state.model_dump_json()) < 64 * 1024


def test_families_are_whole_and_unique(tmp_path: Path) -> None:
    async def page() -> str:
        async with running(tmp_path) as replica:
            return await replica.metrics()

    text = asyncio.run(page())
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    documented = {m.name for m in STATE_METRICS}
    helps = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    assert {t for t in types if t in documented} <= helps
    assert all(name.startswith("kvscaler_") for name in types)
