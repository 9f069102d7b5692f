"""Whether a deployment holds what is asked of it, and the fewest devices that do."""

from hypothesis import given
from hypothesis import strategies as st
from kvscaler.budget import Demand, held, smallest_fleet, smallest_group, with_room_for

from tests.core.budget.deployments import deployment

CHAT = Demand(1200, 300)


def test_requests_are_counted_in_whole_blocks_of_every_pool():
    asked = deployment()
    budget = asked.budget()
    each = -(-1500 // 16)
    assert held(asked, budget, CHAT) == budget.blocks // each
    twice = deployment(data_parallel=2)
    assert held(twice, twice.budget(), CHAT) == 2 * held(asked, budget, CHAT)


def test_what_the_engine_does_not_run_is_not_held():
    few = deployment(max_sequences=8)
    assert held(few, few.budget(), CHAT) == 8
    short = deployment(max_context_tokens=1024)
    assert held(short, short.budget(), CHAT) == 0
    none = deployment("llama-3.1-70b")
    assert held(none, none.budget(), CHAT) == 0


def test_only_limits_that_are_in_the_way_are_raised():
    asked = deployment(max_context_tokens=1024, max_sequences=8)
    roomy = with_room_for(asked, Demand(1200, 300, 20))
    assert (roomy.settings.max_context_tokens, roomy.settings.max_sequences) == (1500, 20)
    assert with_room_for(asked, Demand(100, 10, 8)) is asked
    # A model can't be asked for more than its own context.
    assert with_room_for(asked, Demand(1 << 20)).settings.max_context_tokens == 1024


def test_smallest_group_is_the_first_that_holds_it():
    asked = deployment("llama-3.1-70b")
    found = smallest_group(asked, Demand(8192, 0, 4))
    assert found is not None
    assert (found.devices, found.replicas) == (4, 1)
    assert found.held_each >= 4
    half = asked.changed(tensor_parallel=2)
    assert held(half, half.budget(), Demand(8192, 0, 4)) < 4
    assert smallest_group(asked, Demand(131_072, 0, 100_000)) is None


def test_a_fleet_of_small_replicas_is_preferred_where_it_takes_no_more_devices():
    fleet = smallest_fleet(deployment(), Demand(1200, 300, 500))
    assert fleet is not None
    assert (fleet.replicas, fleet.devices) == (2, 2)
    # One replica of two devices holds the 500 too, and more of them pay where weights weigh more.
    assert smallest_group(deployment(), Demand(1200, 300, 500)).devices == 2
    large = smallest_fleet(deployment("llama-3.1-70b"), Demand(1200, 300, 1000))
    assert large is not None
    assert large.devices == min(
        -(-1000 // each) * ranks
        for ranks in (1, 2, 4, 8)
        if (each := _held_on(ranks, "llama-3.1-70b"))
    )


def _held_on(ranks, name):
    group = deployment(name, tensor_parallel=ranks)
    return held(group, group.budget(), CHAT)


def test_llama_cpp_splits_layers_and_its_context_is_that_of_all_slots():
    asked = deployment(card="t4", engine="llama.cpp")
    fleet = smallest_group(asked, Demand(3000, 0, 4))
    assert fleet is not None
    settings = fleet.deployment.settings
    assert (settings.tensor_parallel, settings.pipeline_parallel) == (1, fleet.devices)
    assert fleet.devices > 1
    assert (settings.max_context_tokens, settings.max_sequences) == (12_000, 4)


def test_our_own_engine_runs_on_one_device():
    asked = deployment("smollm2-135m", "t4", "kvscaler")
    assert smallest_group(asked, Demand(1000, 0, 4)).devices == 1
    assert smallest_group(asked, Demand(1000, 0, 1_000_000)) is None


def test_sglang_replicas_of_attention_share_one_group():
    asked = deployment("deepseek-v3", "h200", "sglang", tensor_parallel=8, data_parallel=8)
    assert (asked.devices, asked.pools) == (8, 8)
    assert deployment(tensor_parallel=2, data_parallel=4).devices == 8


@given(st.integers(1, 4000), st.integers(0, 2000), st.integers(1, 3000))
def test_a_fleet_holds_what_it_was_asked_for(prompt, output, concurrency):
    demand = Demand(prompt, output, concurrency)
    fleet = smallest_fleet(deployment(), demand)
    assert fleet is not None
    assert fleet.replicas * held(fleet.deployment, fleet.budget, demand) >= concurrency
    assert (fleet.replicas - 1) * fleet.held_each < concurrency
