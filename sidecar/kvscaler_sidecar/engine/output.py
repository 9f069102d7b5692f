"""From sampled tokens to what a client reads, and the decision that a request ends.

Runs in the engine's thread, between a step and its commit: a stop string ends a request in the
very step that completes it, so its blocks are free before the next one.
"""

from kvscaler.engine.request import FinishReason
from kvscaler.engine.step import Outcome

from kvscaler_sidecar.engine.job import Job, Produced
from kvscaler_sidecar.executors.seam import SampledToken, Tokenizer
from kvscaler_sidecar.server.stops import StopStrings


class OutputText:
    """Text of one job as it grows."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        request = job.request
        self._job = job
        self._eos_token_ids = tokenizer.eos_token_ids
        self._stream = tokenizer.stream(request.token_ids[: request.prompt_tokens])
        self._stops = StopStrings(job.stops)

    def take(self, token: SampledToken) -> tuple[Outcome, Produced]:
        """Book the next token: what the scheduler must know, and what the client gets.

        The end-of-sequence token counts as output and has no text. `max_tokens` is the
        scheduler's to enforce.
        """
        finish: FinishReason | None = None
        text = ""
        if token.token_id in self._eos_token_ids and not self._job.ignore_eos:
            finish = FinishReason.STOP
        else:
            text = self._stops.feed(self._stream.push(token.token_id))
            if self._stops.matched is not None:
                finish = FinishReason.STOP
        produced = Produced(token.token_id, text, token.logprobs)
        return Outcome(token.token_id, finish), produced

    def finish(self) -> str:
        """Text that was held back, when the request has ended."""
        if self._stops.matched is not None:
            return ""
        rest = self._stops.feed(self._stream.finish())
        return rest if self._stops.matched is not None else rest + self._stops.flush()
