"""The answer for machines: everything that the table shows, in full numbers and stable names."""

from typing import Any

from kvscaler.budget import Change, Fleet

from kvscaler_cli.planning.answer import Answer
from kvscaler_cli.planning.flags import flags_of
from kvscaler_cli.planning.warnings import warnings_of


def document(answer: Answer, *, limits: bool = False) -> dict[str, Any]:
    """The answer as plain values; names as in the API, bytes as numbers.

    With `limits`, what a replica of ours would enforce is added.
    """
    budget, question, deployment = answer.budget, answer.question, answer.deployment
    found: dict[str, Any] = {
        "model": question.model_name,
        "modelDigest": budget.model_digest,
        "parameters": deployment.model.parameters,
        "accelerator": budget.accelerator,
        "engine": budget.engine,
        "engineVersion": str(getattr(deployment.profile, "version", "")) or None,
        "devices": deployment.devices,
        "overrides": list(question.overrides),
        "deviceBytes": budget.device_bytes,
        "utilizationPercent": budget.utilization_percent,
        "usableBytes": budget.usable_bytes,
        "lines": [
            {
                "name": line.name,
                "bytes": line.bytes,
                "lowBytes": line.low_bytes,
                "highBytes": line.high_bytes,
                "basis": line.basis.value,
                "note": line.note,
            }
            for line in budget.lines
        ],
        "overheadBytes": budget.overhead_bytes,
        "kvBytes": budget.kv_bytes,
        "kvLowBytes": budget.kv_low_bytes,
        "kvHighBytes": budget.kv_high_bytes,
        "unusedBytes": budget.unused_bytes,
        "computeDtype": budget.compute_dtype,
        "kvDtype": budget.kv_dtype,
        "blockTokens": budget.block_tokens,
        "blockBytes": budget.block_bytes,
        "blocks": budget.blocks,
        "pools": deployment.pools,
        "poolBytes": budget.pool_bytes,
        "poolTokens": budget.pool_tokens,
        "totalBytes": budget.total_bytes,
        "groups": [
            {
                "kind": group.kind.value,
                "layers": group.layers,
                "blockTokens": group.block_tokens,
                "windowTokens": group.window_tokens,
                "fixedBlocks": group.fixed_blocks,
            }
            for group in budget.layout.groups
        ],
        "maxContextTokens": budget.max_context_tokens,
        "maxSequences": budget.max_sequences,
        "stepTokens": budget.step_tokens,
        "fits": budget.fit.fits,
        "holds": answer.holds,
        "shortfallBytes": budget.fit.shortfall_bytes,
        "message": budget.fit.message,
    }
    if limits and budget.blocks:
        found["limits"] = _limits(answer)
    if question.observation is not None:
        found["observed"] = {
            "predictedKvBytes": answer.predicted.kv_bytes,
            "predictedBlocks": answer.predicted.blocks,
        }
    if question.demand is not None:
        found["request"] = {
            "promptTokens": question.demand.prompt_tokens,
            "outputTokens": question.demand.output_tokens,
            "blocks": answer.request_blocks,
            "concurrent": answer.held,
        }
    if question.concurrency is not None:
        found["concurrency"] = {
            "asked": question.concurrency,
            "largestContextTokens": answer.context_at_concurrency,
            "fewestDevices": _fleet(answer.fleet),
            "smallestReplica": _fleet(answer.group),
        }
    if answer.waste is not None:
        found["waste"] = {
            "roundingBytes": answer.waste.rounding_bytes,
            "paddingBytes": answer.waste.padding_bytes,
            "replicationBytes": answer.waste.replication_bytes,
        }
    if answer.decode_floor_seconds is not None:
        found["decodeStepFloorSeconds"] = answer.decode_floor_seconds
    found["alternatives"] = [_change(answer, change) for change in answer.alternatives]
    found["changes"] = [_change(answer, change) for change in answer.changes]
    found["warnings"] = list(warnings_of(answer))
    return found


def _limits(answer: Answer) -> dict[str, Any]:
    """Admission limits, as messages of the admin API: their pydantic costs more than all the rest."""
    from kvscaler.budget.limits import AdmissionPolicy, admission_limits  # noqa: PLC0415

    limits = admission_limits(answer.budget, AdmissionPolicy())
    return {"hash": limits.content_hash, **limits.model_dump(mode="json")}


def _change(answer: Answer, change: Change) -> dict[str, Any]:
    return {
        "name": change.name,
        "flags": " ".join(flags_of(change.settings)),
        "devices": change.devices,
        "replicas": change.replicas,
        "kvBytes": change.budget.kv_bytes,
        "blocks": change.budget.blocks,
        "atOnce": answer.at_once(change),
        "maxContextTokens": change.budget.max_context_tokens,
        "largestContextTokens": answer.context_after(change),
        "fits": change.budget.fit.fits,
    }


def _fleet(fleet: Fleet | None) -> dict[str, Any] | None:
    if fleet is None:
        return None
    return {
        "devices": fleet.devices,
        "replicas": fleet.replicas,
        "tensorParallel": fleet.deployment.settings.tensor_parallel,
        "pipelineParallel": fleet.deployment.settings.pipeline_parallel,
        "concurrentEach": fleet.held_each,
    }
