"""Text of a replica that computes none: a tokenizer without files, and tokens by seed.

What a modelled replica needs of a prompt is its length in tokens, and which prompts begin alike.
The tokenizer of a model that is not in the image can't be had, so one token stands for four bytes
of UTF-8, which is about what the tokenizers of Llama 3 and its kind make of English. The output is
syllables, drawn by the request's seed: the same seed gives the same text, and nobody takes it for
a model's answer. It ends after `max_tokens`, or by a stated mean length with a geometric tail.
"""

from collections.abc import Sequence

from kvscaler.engine.request import EngineRequest

from kvscaler_sidecar.draws import seed_of, uniform
from kvscaler_sidecar.executors.seam import SampledToken, SamplingParams

BYTES_PER_TOKEN = 4
SYLLABLES = tuple(
    gap + consonant + vowel for gap in (" ", "") for consonant in "bdfklmnprst" for vowel in "aeiou"
)
"""Text of the output tokens, by id; half of them begin a word."""
SMALLEST_VOCABULARY = len(SYLLABLES) + 1
_ENDS = 1 << 64
"""Added to a seed, it gives the draws that decide where the output ends."""
_GREEDY_SEED = 0


class SyntheticStream:
    """Text of output tokens: every one is whole by itself."""

    def push(self, token_id: int) -> str:
        """The token's syllable; the end-of-sequence token has none."""
        return SYLLABLES[token_id] if token_id < len(SYLLABLES) else ""

    def finish(self) -> str:
        """Nothing is ever held back."""
        return ""


class SyntheticTokenizer:
    """See `seam.Tokenizer`; ids are those of a vocabulary of `vocab_size` entries."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < SMALLEST_VOCABULARY:
            raise ValueError(
                f"a vocabulary of {vocab_size} is too small: synthetic text needs at least "
                f"{SMALLEST_VOCABULARY} tokens"
            )
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset({vocab_size - 1})

    def encode(self, text: str) -> list[int]:
        """One id for each four bytes of UTF-8, the rest included."""
        data, size = text.encode(), self.vocab_size
        return [
            int.from_bytes(data[at : at + BYTES_PER_TOKEN], "little") % size
            for at in range(0, len(data), BYTES_PER_TOKEN)
        ]

    def least_tokens(self, text: str) -> int:
        """Exactly as many as `encode` gives."""
        return -(-len(text.encode()) // BYTES_PER_TOKEN)

    def token_text(self, token_id: int) -> str:
        """The syllable of an output token."""
        return SyntheticStream().push(token_id)

    def stream(self, prompt_ids: Sequence[int]) -> SyntheticStream:
        """A stream that does not depend on the prompt."""
        return SyntheticStream()

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """Roles and texts, a line each: a stand-in for the model's own template."""
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:"


class SyntheticTokens:
    """Draws output tokens. `mean_output_tokens` 0 leaves the end to `max_tokens`."""

    def __init__(self, vocab_size: int, mean_output_tokens: int = 0) -> None:
        self._end = vocab_size - 1
        self._end_share = 1 / mean_output_tokens if mean_output_tokens else 0.0
        self._seeds: dict[EngineRequest, int] = {}

    def __len__(self) -> int:
        return len(self._seeds)

    def __contains__(self, request: EngineRequest) -> bool:
        return request in self._seeds

    def add(self, request: EngineRequest, params: SamplingParams) -> None:
        """Learn a request's seed; temperature 0 means the same tokens every time."""
        greedy = params.seed is None and params.temperature == 0
        self._seeds[request] = _GREEDY_SEED if greedy else seed_of(params)

    def remove(self, request: EngineRequest) -> None:
        """Forget a request; unknown ones are ignored."""
        self._seeds.pop(request, None)

    def next(self, request: EngineRequest) -> SampledToken:
        """The token after those that the request has: a function of its seed and their number."""
        seed, index = self._seeds[request], request.generated_tokens
        if self._end_share and uniform(seed + _ENDS, index) < self._end_share:
            return SampledToken(self._end)
        return SampledToken(int(uniform(seed, index) * len(SYLLABLES)))


def unsupported_field(params: SamplingParams) -> str | None:
    """The first field of a request that tokens without probabilities can't honour, by name.

    The draw is uniform, and so the same at every temperature above 0.
    """
    asked = {
        "logprobs": params.logprobs is not None,
        "top_p": params.top_p < 1,
        "top_k": params.top_k > 0,
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
    }
    return next((name for name, is_asked in asked.items() if is_asked), None)
