"""The demo's verdict: every check holds on a good run, and each fails when its condition does."""

from dataclasses import replace

import pytest

from hack.demo.observe import Observer, PodSample, Sample
from hack.demo.report import Objectives, Phase, by_phase, judge, operator_restarts, scale_up
from hack.demo.traffic import Request, Result

PHASES = [
    Phase("calm", 0.0, 40.0, 0.5),
    Phase("spike", 40.0, 130.0, 2.5),
    Phase("calm again", 130.0, 200.0, 0.5),
]
CAPACITY = 40


def pod(name, reserved, ready=True, finished=0):
    occupancy = {"capacity_blocks": CAPACITY, "reserved_blocks": reserved}
    state = {
        "occupancy": occupancy,
        "capacity": {"kv_blocks": CAPACITY},
        "traffic": {"finished": finished, "finished_block_seconds": 40.0 * finished},
    }
    return PodSample(name, name, "10.0.0.1", ready, False, 0, "", None, None, state)


def sample(at, desired, pods, constraint="Memory"):
    decision = {
        "desiredReplicas": desired,
        "bindingConstraint": constraint,
        "message": f"{constraint}: words",
    }
    service = {"spec": {"replicas": desired}, "status": {"decision": decision}}
    return Sample(at, service, pods)


def good_samples():
    return [
        sample(10, 1, [pod("a", 5)], "MinReplicas"),
        sample(43, 3, [pod("a", 38)]),
        sample(60, 3, [pod("a", 38), pod("b", 30), pod("c", 10, ready=False)]),
        sample(70, 3, [pod("a", 38), pod("b", 30), pod("c", 10)]),
        sample(190, 1, [pod("a", 2)], "MinReplicas"),
    ]


def request(at, result=Result.OK, first=0.5):
    made = Request("spike", at, 30, 16)
    made.result, made.ended_at = result, at + 5
    if result is Result.OK:
        made.first_token_seconds, made.token_gaps_seconds = first, [0.1] * 15
    return made


def good_requests():
    early = [request(45 + i, Result.REFUSED) for i in range(10)]
    return [request(5), *early, request(80), request(100, Result.REFUSED), request(150)]


def verdict(samples=None, requests=None, errors=()):
    observer = Observer(kube=None, namespace="n", name="x", samples=samples or good_samples())
    checks = judge(observer, requests or good_requests(), PHASES, list(errors), 5, 1)
    return {check.name.split(" ")[0] + " " + check.name.split(" ")[1]: check for check in checks}


def failed(**changes):
    return [name for name, check in verdict(**changes).items() if not check.holds]


def test_a_good_run_passes_every_check():
    assert failed() == []


def changed(index, **fields):
    samples = good_samples()
    samples[index] = replace(samples[index], **fields)
    return samples


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"samples": changed(1, service=sample(43, 3, [], "DecodeCompute").service)},
         "scale-up's binding"),
        ({"samples": [s for s in good_samples() if s.at not in (60, 70)]}, "admitted blocks"),
        ({"requests": [request(45), *[request(90 + i, Result.REFUSED) for i in range(9)]]},
         "refusals fell"),
        ({"requests": [request(45), request(80)]}, "refusals fell"),
        ({"samples": changed(2, service=sample(60, 5, []).service)}, "replicas stayed"),
        ({"samples": good_samples()[:-1]}, "replicas returned"),
        ({"requests": [*good_requests(), request(90, Result.BROKEN)]}, "no stream"),
        ({"requests": [*good_requests(), Request("spike", 90, 30, 16)]}, "no stream"),
        ({"samples": changed(3, pods=[replace(pod("a", 38), restarts=1), pod("b", 30),
                                      pod("c", 10)])}, "nothing restarted"),
        ({"errors": ["boom"]}, "the operator"),
    ],
)  # fmt: skip
def test_each_check_fails_on_its_own_condition(changes, name):
    assert name in failed(**changes)


def test_the_answer_to_the_spike_is_timed_from_its_begin():
    answer = scale_up(good_samples(), PHASES[1])
    assert answer["to_patch_seconds"] == 3
    assert answer["to_new_pod_ready_seconds"] == 20
    assert answer["binding_constraint"] == "Memory"


def test_attainment_counts_refused_and_slow_requests_as_misses():
    requests = [request(50), request(51, first=9.0), request(52, Result.REFUSED), request(53)]
    spike = by_phase(requests, PHASES, Objectives(2.0, 0.5))[1]
    assert spike["offered"] == 4
    assert spike["attainment"] == 0.5
    assert spike["refused"] == 1


def test_a_restarted_operator_does_not_hide_its_errors_in_a_fresh_log():
    def pod_of(restarts):
        return {"status": {"containerStatuses": [{"name": "operator", "restartCount": restarts}]}}

    assert operator_restarts(pod_of(0)) == []
    (words,) = operator_restarts(pod_of(2))
    assert "operator restarted 2 times" in words
    assert failed(errors=operator_restarts(pod_of(2))) == ["the operator"]
