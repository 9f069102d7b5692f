"""The OpenAI API on port 8000: completions, chat completions and models.

Each request goes parse → tokenize → admit → answer. Anything that goes wrong before the answer
starts is a `Refusal` with its own status; after that the stream is finished, whatever happens to
the replica.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from kvscaler.protocol.refusals import RefusalReason
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from kvscaler_sidecar.chat_template import ChatTemplateError
from kvscaler_sidecar.executors.seam import SamplingParams
from kvscaler_sidecar.server.answer import Serving, answer
from kvscaler_sidecar.server.door import Door, Handler
from kvscaler_sidecar.server.errors import Refusal, error_body, quoted
from kvscaler_sidecar.server.exchange import Exchange
from kvscaler_sidecar.server.format import ChatShape, CompletionShape
from kvscaler_sidecar.server.generate import (
    Wanted,
    check_sequences,
    new_request_id,
    prompt_bytes,
    render,
)
from kvscaler_sidecar.server.held import Hold
from kvscaler_sidecar.server.intake import Intake
from kvscaler_sidecar.server.schema import (
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
)

OWNER = "kvscaler"

Body = TypeVar("Body", CompletionRequest, ChatRequest)


class OpenAIServer:
    """The application. `serving` returns `None` until the model is loaded."""

    def __init__(
        self,
        *,
        served_names: tuple[str, ...],
        serving: Callable[[], Serving | None],
        door: Door,
        max_body_bytes: int,
        max_held_bytes: int,
        started_at: float,
    ) -> None:
        self._served_names = served_names
        self._serving = serving
        self._door = door
        self.intake = Intake(max_body_bytes, max_held_bytes)
        self._started_at = started_at

    def app(self) -> ASGIApp:
        """The ASGI application."""
        door = self._door
        completions = _Endpoint(door, "POST", door.counted(self._completions))
        chat = _Endpoint(door, "POST", door.counted(self._chat))
        return Router(
            routes=[
                Route("/v1/completions", completions),
                Route("/v1/chat/completions", chat),
                Route("/v1/models", _Endpoint(door, "GET", self._models)),
                Route("/v1/models/{name:path}", _Endpoint(door, "GET", self._model)),
            ],
            default=_not_found,
            redirect_slashes=False,
        )

    def _ready(self) -> Serving:
        """The loaded replica, unless it is not there yet or says goodbye."""
        self._door.check_open()
        serving = self._serving()
        if serving is None:
            raise Refusal(
                RefusalReason.NOT_READY,
                "The model is still loading; try again shortly.",
                retry_after_seconds=2,
            )
        return serving

    async def _read(
        self, exchange: Exchange, parse: Callable[[bytes], Body], hold: Hold
    ) -> tuple[Body, float]:
        """The parsed body, and when it had arrived in full."""
        _, request, arrival = await self.intake.read(exchange, parse, hold)
        hold.settle(request.held_bytes)
        return request, arrival

    def _check_model(self, name: str) -> None:
        if name not in self._served_names:
            raise Refusal(
                RefusalReason.UNKNOWN_MODEL,
                f"The model {quoted(name)} is not served here; "
                f"served: {', '.join(self._served_names)}.",
                param="model",
            )

    async def _completions(self, exchange: Exchange) -> None:
        serving = self._ready()
        with self.intake.hold() as hold:
            request, arrival = await self._read(exchange, parse_completion, hold)
            self._check_model(request.model)
            check_sequences(len(request.prompts), request.n)
            sampling = serving.check_sampling(_sampling(request, request.logprobs))
            prompts, limits = await _prompts_of(serving, request, hold)
            request.prompt = ""  # it may be large, and wait long
            wanted = Wanted(
                request_id=new_request_id("cmpl"),
                prompts=prompts,
                max_new_tokens=limits,
                choices=request.n,
                sampling=sampling,
                stops=request.stops,
                ignore_eos=request.ignore_eos,
                cache_salt=request.cache_salt,
                arrival_seconds=arrival,
            )
            shape = CompletionShape(request.logprobs is not None, serving.text.token_text)
            await answer(exchange, serving, request, wanted, shape, hold)

    async def _chat(self, exchange: Exchange) -> None:
        serving = self._ready()
        with self.intake.hold() as hold:
            request, arrival = await self._read(exchange, parse_chat, hold)
            self._check_model(request.model)
            logprobs = (request.top_logprobs or 0) if request.logprobs else None
            sampling = serving.check_sampling(_sampling(request, logprobs))
            prompt = await _prompt_of(serving, request)
            request.messages = []  # they may be large, and wait long
            limit = serving.check_length(len(prompt), request.output_limit, "messages")
            wanted = Wanted(
                request_id=new_request_id("chatcmpl"),
                prompts=[prompt],
                max_new_tokens=[limit],
                choices=request.n,
                sampling=sampling,
                stops=request.stops,
                ignore_eos=request.ignore_eos,
                cache_salt=request.cache_salt,
                arrival_seconds=arrival,
            )
            shape = ChatShape(request.logprobs, serving.text.token_text)
            await answer(exchange, serving, request, wanted, shape, hold)

    async def _models(self, exchange: Exchange) -> None:
        data = [self._model_body(name) for name in self._served_names]
        await exchange.send_json(200, {"object": "list", "data": data})

    async def _model(self, exchange: Exchange) -> None:
        name = exchange.path_parameter("name")
        self._check_model(name)
        await exchange.send_json(200, self._model_body(name))

    def _model_body(self, name: str) -> dict[str, Any]:
        serving = self._serving()
        body: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": int(self._started_at),
            "owned_by": OWNER,
        }
        if serving is not None:
            body["max_model_len"] = serving.max_context_tokens
            body["executor"] = serving.executor.type
            body["time_scale"] = serving.executor.time_scale
        return body


class _Endpoint:
    """A route's endpoint on bare ASGI: Starlette takes objects that are no functions as such."""

    def __init__(self, door: Door, method: str, handler: Handler) -> None:
        self._door = door
        self._method = method
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        if scope["method"] != self._method:
            message = f"{scope['path']} takes {self._method}, not {scope['method']}."
            body = error_body(405, message, None, "method_not_allowed")
            await exchange.send_json(405, body, [("allow", self._method)])
            return
        await self._door.handle(exchange, self._handler)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    exchange = Exchange(scope, receive, send)
    message = (
        f"There is no {scope['method']} {quoted(scope['path'])} here; this server has "
        "/v1/completions, /v1/chat/completions and /v1/models."
    )
    await exchange.send_json(404, error_body(404, message, None, "not_found"))


async def _prompts_of(
    serving: Serving, request: CompletionRequest, hold: Hold
) -> tuple[list[list[int]], list[int]]:
    """Token ids of all prompts, and how many output tokens each may have.

    Each is judged before the next is encoded, since token ids take more memory than their text.
    """
    prompts: list[list[int]] = []
    limits: list[int] = []
    for prompt in request.prompts:
        if isinstance(prompt, str):
            token_ids = await serving.encode(prompt, "prompt")
            limits.append(serving.check_length(len(token_ids), request.max_tokens, "prompt"))
            hold.add(prompt_bytes(len(token_ids)))
        else:
            token_ids = prompt
            limits.append(serving.check_length(len(token_ids), request.max_tokens, "prompt"))
            _check_ids(token_ids, serving.text.vocab_size)
        prompts.append(token_ids)
    if not prompts:
        serving.check_length(0, None, "prompt")
    return prompts, limits


async def _prompt_of(serving: Serving, request: ChatRequest) -> list[int]:
    """Token ids of a chat."""
    messages = [{"role": m.role, "content": m.text} for m in request.messages]
    try:
        text = await render(serving.lane, serving.text.render_chat, messages)
    except ChatTemplateError as error:
        raise Refusal(
            RefusalReason.INVALID_REQUEST, f"These messages make no prompt: {error}", "messages"
        ) from error
    return await serving.encode(text, "messages")


def _check_ids(token_ids: list[int], vocab_size: int) -> None:
    if max(token_ids) < vocab_size:
        return
    for position, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise Refusal(
                RefusalReason.INVALID_REQUEST,
                f"Token id {token_id} at position {position} is not in the vocabulary of "
                f"{vocab_size} tokens.",
                param="prompt",
            )


def _sampling(request: CompletionRequest | ChatRequest, logprobs: int | None) -> SamplingParams:
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logprobs=logprobs,
    )
