"""A request as the engine sees it: token ids, blocks and progress, no text and no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class RequestState(StrEnum):
    """Waiting (for admission or, after a preemption, for blocks), running, finished."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended, in OpenAI's words where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sequence. Identity is the object; `request_id` is for people and maps.

    `token_ids` holds the prompt and what was generated; the first `computed_tokens` of them have
    their keys and values in `block_table` (physical block numbers, in order).
    """

    request_id: str
    token_ids: list[int]
    prompt_tokens: int
    max_new_tokens: int
    arrival_seconds: float
    priority: int = 0
    """Higher goes first and is preempted last; 0 is usual."""
    cache_salt: str = ""
    """Requests share cached prefixes only within one salt."""
    cache_keys: tuple[str, ...] = ()
    """What else keys and values depend on, such as an adapter's name."""
    state: RequestState = RequestState.WAITING
    computed_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache at the last admission."""
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Hash chain over full blocks of `token_ids`, extended as tokens arrive."""
    preemptions: int = 0
    finish_reason: FinishReason | None = None

    @classmethod
    def from_prompt(
        cls, request_id: str, prompt: Sequence[int], max_new_tokens: int, arrival_seconds: float
    ) -> "EngineRequest":
        """A fresh request for `prompt` (at least one token id)."""
        return cls(request_id, list(prompt), len(prompt), max_new_tokens, arrival_seconds)

    @property
    def generated_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def uncomputed_tokens(self) -> int:
        """Known tokens without keys and values: the rest of a prefill, or 1 in decode."""
        return len(self.token_ids) - self.computed_tokens

    @property
    def held_blocks(self) -> int:
        """KV blocks that it holds now."""
        return len(self.block_table)

    @property
    def has_first_token(self) -> bool:
        """Whether its first output token was seen to come."""
        return self.generated_tokens > 0
