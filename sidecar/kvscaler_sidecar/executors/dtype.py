"""Which number format to compute in: bf16 where the CPU has instructions for it, else fp32.

bf16 halves the bytes that every decode step must read, at no cost in quality that we could
measure. But without AVX-512-bf16 or AMX torch emulates it, several times slower than fp32; and a
flag alone is no proof in a virtual machine. So a short timed matrix product has the last word.
"""

import time
from dataclasses import dataclass

import torch
from kvscaler.budget.settings import AUTO, CPU_COMPUTE_DTYPES

_ROWS, _INNER, _COLUMNS = 8, 1024, 2048
_REPEATS = 9


@dataclass(frozen=True, slots=True)
class ComputeDtype:
    """The chosen format and, in words for people, why."""

    dtype: torch.dtype
    reason: str

    @property
    def name(self) -> str:
        """`float32` or `bfloat16`."""
        return str(self.dtype).removeprefix("torch.")


def choose_compute_dtype(wanted: str = AUTO, device: str = "cpu") -> ComputeDtype:
    """The format to compute in on `device`.

    Args:
        wanted: one of `CPU_COMPUTE_DTYPES`.

    Raises:
        ValueError: `wanted` is none of these.
    """
    if wanted not in CPU_COMPUTE_DTYPES:
        words = ", ".join(CPU_COMPUTE_DTYPES)
        raise ValueError(f"compute dtype is {wanted!r}; use one of {words}")
    if wanted != AUTO:
        return ComputeDtype(getattr(torch, wanted), "configured")
    if device != "cpu":
        return ComputeDtype(torch.bfloat16, f"{device} computes bf16 natively")
    feature = _bf16_feature()
    if feature is None:
        return ComputeDtype(torch.float32, "this CPU has neither AVX-512-bf16 nor AMX")
    fp32, bf16 = _product_seconds(torch.float32), _product_seconds(torch.bfloat16)
    words = f"{feature}; a timed matrix product took {bf16 * 1e3:.2f} ms in bf16, {fp32 * 1e3:.2f} in fp32"
    return ComputeDtype(torch.bfloat16 if bf16 < fp32 else torch.float32, words)


def _bf16_feature() -> str | None:
    capabilities = torch.backends.cpu.get_cpu_capability()
    if torch.cpu._is_amx_tile_supported():
        return f"AMX ({capabilities})"
    if torch.cpu._is_avx512_bf16_supported():
        return f"AVX-512-bf16 ({capabilities})"
    return None


def _product_seconds(dtype: torch.dtype) -> float:
    """Fastest of a few products of decode shape: load of others on the machine only slows."""
    left = torch.ones(_ROWS, _INNER, dtype=dtype)
    right = torch.ones(_COLUMNS, _INNER, dtype=dtype)
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        torch.nn.functional.linear(left, right)
        best = min(best, time.perf_counter() - start)
    return best
