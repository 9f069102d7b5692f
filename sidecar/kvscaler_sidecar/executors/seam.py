"""What the live loop and the server need from a model, whichever executor runs it.

The loop owns the order of calls, all from the engine's thread: `add` before a request's first
chunk, `execute` once a step, `remove` when the request has ended. An executor keeps per-request
sampling state (seeded generators, counts for penalties) between `add` and `remove`, so that a
preempted and recomputed request goes on with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

from kvscaler.engine.request import EngineRequest
from kvscaler.engine.step import StepPlan
from kvscaler.protocol.state import ExecutorReport, StepCosts


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, in OpenAI's terms."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 takes all tokens."""
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    """How many alternatives to report with each token, 0 to 20; `None` reports nothing."""

    def for_choice(self, index: int) -> Self:
        """The parameters of the choice `index` of n: a seeded one gets a seed of its own."""
        if self.seed is None or index == 0:
            return self
        return replace(self, seed=self.seed + index)


class TokenLogprobs(NamedTuple):
    """Log probability of the chosen token, and of the most likely ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SampledToken(NamedTuple):
    """What one sampling chunk gave."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class Executor(Protocol):
    """Runs steps over a pool of `kv_blocks` blocks that it has allocated."""

    report: ExecutorReport
    block_tokens: int
    block_bytes: int
    """Over all layers, keys and values."""

    @property
    def kv_blocks(self) -> int:
        """Blocks of the pool."""
        ...

    @property
    def pool_bytes(self) -> int:
        """Counted from the allocated tensors."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Counted from the loaded tensors."""
        ...

    def add(self, request: EngineRequest, params: SamplingParams) -> None:
        """Learn how to sample a request."""
        ...

    def remove(self, request: EngineRequest) -> None:
        """Forget a request; unknown ones are ignored."""
        ...

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        """Compute a step: one token per sampling chunk, in the order of the chunks."""
        ...

    def measure(self) -> StepCosts | None:
        """Measured constants of the step-time model, before the first request."""
        ...


class TextStream(Protocol):
    """Turns one request's output tokens into text, whole characters at a time."""

    def push(self, token_id: int) -> str:
        """Text that became complete with this token; empty inside a multi-byte character."""
        ...

    def finish(self) -> str:
        """What is left at the end, replacement characters for incomplete bytes included."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back. `encode` and `render_chat` may be called from any thread."""

    vocab_size: int
    eos_token_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; special tokens that the text spells out are understood."""
        ...

    def least_tokens(self, text: str) -> int:
        """At least so many tokens `encode` would give, known without encoding."""
        ...

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself."""
        ...

    def stream(self, prompt_ids: Sequence[int]) -> TextStream:
        """A stream for the output that follows `prompt_ids`."""
        ...

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt that the model's chat template makes, generation prompt included."""
        ...
