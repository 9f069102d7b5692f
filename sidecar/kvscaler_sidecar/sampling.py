"""From logits to tokens: greedy, temperature, top-k, top-p, penalties, log-probabilities.

Random numbers come from `draws`, so that a recomputed request draws the same again.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from kvscaler.budget.profiles.own import RANDOM_ROWS

from kvscaler_sidecar.draws import uniform
from kvscaler_sidecar.executors.seam import SampledToken, SamplingParams, TokenLogprobs

NUCLEUS_CANDIDATES = 512
"""Top-p looks at this many best tokens first and sorts the whole vocabulary only if it must."""
COLDEST = 1e-5
"""A lower temperature is greedy: logits divided by it overflow, and draws from NaN are garbage."""


@dataclass(slots=True)
class SamplingRow:
    """One row to sample: the request's parameters, its seed, and what it has generated so far.

    The length of `generated` is the index of the draw, and penalties count its members.
    """

    params: SamplingParams
    seed: int
    generated: Sequence[int] = ()


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """One token for each row of `logits` (`[rows, vocabulary]`, fp32; may be overwritten).

    Reported log-probabilities are the model's own: before temperature, penalties and filters.
    """
    reports = {
        index: torch.log_softmax(logits[index], dim=-1)
        for index, row in enumerate(rows)
        if row.params.logprobs is not None
    }
    for index, row in enumerate(rows):
        _penalize(logits[index], row)
    chosen: list[int] = torch.argmax(logits, dim=-1).tolist()
    drawn = [index for index, row in enumerate(rows) if row.params.temperature >= COLDEST]
    for start in range(0, len(drawn), RANDOM_ROWS):
        part = drawn[start : start + RANDOM_ROWS]
        for index, token in zip(part, _draw(logits[part], [rows[i] for i in part]), strict=True):
            chosen[index] = token
    return [
        SampledToken(token, _report(token, reports.get(index), rows[index].params.logprobs))
        for index, token in enumerate(chosen)
    ]


def _report(token: int, logprobs: torch.Tensor | None, count: int | None) -> TokenLogprobs | None:
    if logprobs is None or count is None:
        return None
    values, indices = torch.topk(logprobs, min(count, logprobs.shape[-1]))
    top = tuple(zip(indices.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(logprobs[token]), top)


def _penalize(logits: torch.Tensor, row: SamplingRow) -> None:
    presence, frequency = row.params.presence_penalty, row.params.frequency_penalty
    if (presence == 0 and frequency == 0) or not row.generated:
        return
    counts = Counter(row.generated)
    ids = torch.tensor(list(counts), device=logits.device)
    times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
    logits[ids] -= times * frequency + presence


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Inverse-CDF draws: the token at which the cumulative probability passes the number.

    Filters work as in vLLM and transformers: temperature, then top-k, then top-p of what is left,
    renormalised. Only filtered rows are sorted, and usually only their best candidates.
    """
    temperatures = torch.tensor([row.params.temperature for row in rows], device=logits.device)
    probabilities = torch.softmax(logits / temperatures[:, None], dim=-1)
    tokens: list[int] = []
    for index, row in enumerate(rows):
        weights, ids = _filtered(probabilities[index], row.params)
        cumulative = torch.cumsum(weights, dim=-1, dtype=torch.float64)
        target = uniform(row.seed, len(row.generated)) * float(cumulative[-1])
        place = int(torch.searchsorted(cumulative, target, right=True))
        place = min(place, len(weights) - 1)  # rounding may put the target on the very end
        tokens.append(place if ids is None else int(ids[place]))
    return tokens


def _filtered(
    probabilities: torch.Tensor, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights that may be drawn, and their token ids (`None`: all, in order)."""
    vocabulary = probabilities.shape[-1]
    top_k = params.top_k if 0 < params.top_k < vocabulary else None
    if top_k is None and params.top_p >= 1:
        return probabilities, None
    weights, ids = torch.topk(probabilities, top_k or min(NUCLEUS_CANDIDATES, vocabulary))
    if params.top_p >= 1:
        return weights, ids
    # Top-p is a share of the mass that top-k left; without top-k that is the whole, 1.
    goal = params.top_p * (float(weights.sum()) if top_k else 1.0)
    if float(weights.sum()) < goal:
        weights, ids = torch.sort(probabilities, descending=True)
    before = torch.cumsum(weights, dim=-1) - weights
    keep = max(1, int((before < goal).sum()))
    return weights[:keep], ids[:keep]
