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
    render,
)
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
        started_at: float,
    ) -> None:
        self._served_names = served_names
        self._serving = serving
        self._door = door
        self._intake = Intake(max_body_bytes)
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
        self, exchange: Exchange, parse: Callable[[bytes], Body]
    ) -> tuple[Body, int, float]:
        """The parsed body, its length in bytes, and when it had arrived in full."""
        body, parsed, arrival = await self._intake.read(exchange, parse)
        return parsed, len(body), arrival

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
        request, body_bytes, arrival = await self._read(exchange, parse_completion)
        self._check_model(request.model)
        check_sequences(len(request.prompts), request.n)
        sampling = serving.check_sampling(_sampling(request, request.logprobs))
        prompts: list[list[int]] = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                prompts.append(await serving.encode(prompt, "prompt"))
            else:
                prompts.append(_checked_ids(prompt, serving.text.vocab_size))
        if not prompts:
            serving.check_length(0, None, "prompt")
        limits = [serving.check_length(len(p), request.max_tokens, "prompt") for p in prompts]
        wanted = Wanted(
            request_id=new_request_id("cmpl"),
            prompts=prompts,
            max_new_tokens=limits,
            choices=request.n,
            sampling=sampling,
            stops=request.stops,
            ignore_eos=request.ignore_eos,
            cache_salt=request.cache_salt,
            body_bytes=body_bytes,
            arrival_seconds=arrival,
        )
        shape = CompletionShape(request.logprobs is not None, serving.text.token_text)
        await answer(exchange, serving, request, wanted, shape)

    async def _chat(self, exchange: Exchange) -> None:
        serving = self._ready()
        request, body_bytes, arrival = await self._read(exchange, parse_chat)
        self._check_model(request.model)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        sampling = serving.check_sampling(_sampling(request, logprobs))
        messages = [{"role": m.role, "content": m.text} for m in request.messages]
        try:
            text = await render(serving.text.render_chat, messages)
        except ChatTemplateError as error:
            raise Refusal(
                RefusalReason.INVALID_REQUEST, f"These messages make no prompt: {error}", "messages"
            ) from error
        prompt = await serving.encode(text, "messages")
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
            body_bytes=body_bytes,
            arrival_seconds=arrival,
        )
        shape = ChatShape(request.logprobs, serving.text.token_text)
        await answer(exchange, serving, request, wanted, shape)

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


def _checked_ids(token_ids: list[int], vocab_size: int) -> list[int]:
    for position, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise Refusal(
                RefusalReason.INVALID_REQUEST,
                f"Token id {token_id} at position {position} is not in the vocabulary of "
                f"{vocab_size} tokens.",
                param="prompt",
            )
    return token_ids


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
