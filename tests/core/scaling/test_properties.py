"""What holds for every situation."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from kvscaler.scaling import Constraint, History, ReplicaPhase, ScalingSpec, decide
from kvscaler.traffic import AbsenceReason, Absent, Present

from tests.core.scaling.situations import H100, LENGTHS, NOW, capacity, fleet, traffic, use

ABSENT = st.sampled_from(AbsenceReason).map(lambda reason: Absent(reason, "drawn"))
SPECS = st.tuples(st.integers(1, 8), st.integers(0, 12), st.floats(0, 600)).map(
    lambda t: ScalingSpec(t[0], t[0] + t[1], t[2], 600.0, 0.05)
)
CAPACITY = st.builds(
    capacity, st.integers(1, 5000), st.integers(1, 300), st.sampled_from([None, H100])
)
TRAFFIC = st.builds(
    traffic,
    st.floats(0, 500),
    st.floats(0, 500),
    refused=st.floats(0, 10),
    coverage=st.sampled_from([0.5, 1.0]),
    lengths=st.sampled_from([None, LENGTHS, replace(LENGTHS, block_seconds=0.0)]),
)
OCCUPANCY = st.builds(use, st.integers(0, 5000), st.integers(0, 5000), blocks=st.just(5000))
FLEETS = st.tuples(
    st.lists(st.sampled_from(ReplicaPhase), max_size=8), st.integers(0, 12), st.booleans()
).map(lambda t: fleet(*t[0], target=t[1], rollout=t[2]))
HISTORIES = st.tuples(
    st.floats(0, 1000),
    st.lists(st.tuples(st.floats(0, 1000), st.integers(0, 30)), max_size=5),
    st.integers(0, 20),
    st.none() | st.floats(0, 2000),
).map(
    lambda t: replace(
        History.fresh(NOW - t[0], t[2]),
        signals_lost_at=None if t[3] is None else NOW - t[3],
    )
)


@st.composite
def situations(draw):
    pods = draw(FLEETS)
    occupancy = {r.pod_uid: draw(OCCUPANCY | ABSENT) for r in pods.replicas if draw(st.booleans())}
    return (
        draw(SPECS),
        draw(CAPACITY | ABSENT),
        draw(TRAFFIC | ABSENT),
        occupancy,
        pods,
        draw(HISTORIES),
        NOW,
    )


@settings(max_examples=300)
@given(situations())
def test_replicas_stay_within_their_bounds_and_the_decision_explains_itself(situation):
    spec, _, _, _, pods, _, _ = situation
    decision = decide(*situation)
    assert spec.min_replicas <= decision.desired_replicas <= spec.max_replicas
    assert decision.message.startswith(f"{decision.binding_constraint}: ")
    assert decision == decide(*situation)
    removable = {
        r.pod_uid
        for r in pods.replicas
        if r.phase not in {ReplicaPhase.DRAINING, ReplicaPhase.TERMINATING}
    }
    assert set(decision.victims) <= removable
    assert len(removable) - len(decision.victims) >= min(decision.desired_replicas, len(removable))


@settings(max_examples=300)
@given(situations())
def test_what_is_missing_never_shrinks(situation):
    spec, room, seen, occupancy, pods, _, _ = situation
    decision = decide(*situation)
    ready = pods.uids(ReplicaPhase.READY)
    heard = all(isinstance(occupancy.get(uid), Present) for uid in ready)
    whole = isinstance(seen, Present) and seen.value.coverage >= 1.0 and isinstance(room, Present)
    if not (heard and whole and ready):
        assert decision.desired_replicas >= min(pods.target_replicas, spec.max_replicas)


@settings(max_examples=200)
@given(situations(), st.data())
def test_losing_a_signal_never_leaves_fewer_replicas(situation, data):
    spec, room, _, occupancy, pods, history, now = situation
    before = decide(*situation).desired_replicas
    kept = {uid: s for uid, s in occupancy.items() if data.draw(st.booleans())}
    lost = data.draw(ABSENT)
    after = decide(spec, room, lost, kept, pods, history, now).desired_replicas
    held = min(spec.max_replicas, pods.target_replicas)
    assert after >= min(before, held)


@settings(max_examples=200)
@given(situations(), st.floats(0, 1))
def test_after_a_restart_nothing_shrinks_within_a_window(situation, part):
    spec, room, seen, occupancy, pods, _, _ = situation
    start = NOW - part * spec.stabilization_seconds * 0.99
    history = History.fresh(start, pods.target_replicas)
    decision = decide(spec, room, seen, occupancy, pods, history, NOW)
    if spec.stabilization_seconds > 0:
        assert decision.desired_replicas >= min(pods.target_replicas, spec.max_replicas)


@settings(max_examples=200)
@given(SPECS, CAPACITY, TRAFFIC, st.floats(1.0, 5.0), st.integers(1, 6))
def test_more_traffic_never_asks_for_fewer(spec, room, seen, factor, ready):
    pods = fleet(*[ReplicaPhase.READY] * ready)
    occupancy = {f"p{i}": use() for i in range(ready)}
    window = seen.value

    def needs(w):
        found = decide(
            spec, room, Present(w, "r", NOW), occupancy, pods, History.fresh(NOW, ready), NOW
        )
        return {c.constraint: c.needed for c in found.candidates}

    def scaled(rate):
        return replace(rate, count=rate.count * factor)

    none = {
        "arrivals_short": replace(window.arrivals_short, count=0.0),
        "arrivals_recent": (),
    }
    steady = replace(window, **none)
    more = replace(steady, arrivals_level=scaled(window.arrivals_level))
    low, high = needs(steady), needs(more)
    for constraint in (Constraint.MEMORY, Constraint.DECODE_COMPUTE):
        if constraint in low:
            assert high[constraint] >= low[constraint] - 1e-9
