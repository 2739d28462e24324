"""The HTTP endpoints: OpenAI's, and what operations need."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from tensorrt_llm.serve.chat_template import ChatTemplate
from tensorrt_llm.serve.engine_host import EngineHost
from tensorrt_llm.serve.errors import ApiError
from tensorrt_llm.serve.generation import Generation
from tensorrt_llm.serve.logprobs import TokenTexts
from tensorrt_llm.serve.metrics import ServerMetrics
from tensorrt_llm.serve.openai_protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    SamplingRequest,
)
from tensorrt_llm.serve.openai_responses import Answer, ChatAnswer, CompletionAnswer
from tensorrt_llm.serve.transport import (
    EventStream,
    answer_error,
    answer_http_error,
    answer_invalid_body,
    unless_disconnected,
)
from tensorrt_llm.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tensorrt_llm.llmapi import LLM


Endpoint = Callable[..., Awaitable[Response]]


class OpenAIServer:
    """One model behind OpenAI's API.

    Args:
        host: where the LLM lives.
        model_name: what clients call the model.
        chat_template: Jinja source in place of the tokenizer's template.
    """

    def __init__(self, host: EngineHost, model_name: str, chat_template: str | None = None) -> None:
        self._host = host
        self._model_name = model_name
        self._template_source = chat_template
        self._created = int(time.time())
        self._metrics = ServerMetrics(host.stats)
        self._texts: TokenTexts | None = None
        self._template: ChatTemplate | None = None
        self._running: set[Generation] = set()
        self.app = self._build_app()

    def abort_all(self) -> None:
        """Have the engine give up every running request; their clients get an error event."""
        for generation in self._running:
            generation.abort()

    def _build_app(self) -> FastAPI:
        app = FastAPI(title="trtllm-serve", version=__version__)
        operations: dict[str, Endpoint] = {
            "/health": self.health,
            "/version": self.version,
            "/metrics": self.metrics,
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
        }
        generations: dict[str, Endpoint] = {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat_completions,
        }
        ready = [Depends(self._require_ready)]  # asked before the body is looked at
        for path, endpoint in operations.items():
            app.get(path, response_model=None)(endpoint)
        for path, endpoint in generations.items():
            app.post(path, response_model=None, dependencies=ready)(endpoint)
        app.add_exception_handler(ApiError, answer_error)
        app.add_exception_handler(RequestValidationError, answer_invalid_body)
        app.add_exception_handler(HTTPException, answer_http_error)
        app.add_exception_handler(Exception, answer_error)
        return app

    # Operations

    async def health(self) -> Response:
        """200 while the model can decode; 503 before that and after the engine died."""
        self._host.ready()
        return Response()

    async def version(self) -> Response:
        """The server's version."""
        return JSONResponse({"version": __version__})

    async def metrics(self) -> Response:
        """Counters, gauges and histograms in Prometheus' text format."""
        return Response(self._metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> Response:
        """The served model, as a list of one."""
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, name: str) -> Response:
        """The served model; 404 for any other name."""
        self._check_model(name)
        return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "tensorrt_llm",
        }

    # Generation

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Continue a text or a list of token ids."""
        llm = self._llm_for(body)
        generation = self._submit(llm, body, body.prompt)
        prompts = [_prompt_text(llm, p) for p in body.prompt] if body.echo else []
        return await self._respond(
            body, request, generation, CompletionAnswer(body, self._token_texts(llm), prompts)
        )

    async def chat_completions(self, body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation."""
        llm = self._llm_for(body)
        prompt = self._chat_template(llm).render(
            [message.for_template() for message in body.messages],
            body.add_generation_prompt is not False,
            body.chat_template_kwargs or {},
        )
        generation = self._submit(llm, body, [prompt])
        return await self._respond(
            body, request, generation, ChatAnswer(body, self._token_texts(llm))
        )

    async def _require_ready(self) -> None:
        self._host.ready()

    def _llm_for(self, body: SamplingRequest) -> "LLM":
        self._check_model(body.model)
        return self._host.ready()

    def _check_model(self, name: str) -> None:
        if name != self._model_name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {self._model_name!r}",
                param="model",
                code="model_not_found",
            )

    def _submit(
        self, llm: "LLM", body: SamplingRequest, prompts: Sequence[str | list[int]]
    ) -> Generation:
        arrival = time.perf_counter()
        outputs = []
        try:
            params = body.sampling_params()
            for prompt in prompts:
                outputs.append(llm.generate_async(prompt, params, streaming=True))
        except Exception as error:
            for output in outputs:
                output.abort()
            if isinstance(error, ValueError):
                raise ApiError(400, str(error), param=_named_field(body, str(error))) from None
            raise
        generation = Generation(outputs, body.choices, self._metrics, arrival)
        self._running.add(generation)
        return generation

    async def _respond(
        self, body: SamplingRequest, request: Request, generation: Generation, answer: Answer
    ) -> Response:
        if body.stream:
            return EventStream(answer.chunks(generation), lambda: self._close(generation))
        try:
            return await unless_disconnected(request, answer.whole(generation))
        finally:
            self._close(generation)

    def _close(self, generation: Generation) -> None:
        generation.close()
        self._running.discard(generation)

    def _token_texts(self, llm: "LLM") -> TokenTexts:
        if self._texts is None:
            self._texts = TokenTexts(_tokenizer(llm))
        return self._texts

    def _chat_template(self, llm: "LLM") -> ChatTemplate:
        if self._template is None:
            self._template = ChatTemplate(_tokenizer(llm), self._template_source)
        return self._template


def _prompt_text(llm: "LLM", prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else str(_tokenizer(llm).decode(prompt))


def _tokenizer(llm: "LLM") -> "PreTrainedTokenizerBase":
    assert llm.tokenizer is not None, "the command refuses skip_tokenizer_init"
    return llm.tokenizer


def _named_field(body: SamplingRequest, message: str) -> str | None:
    """Errors about a value begin with its field's name."""
    name = message.partition(" ")[0].partition("[")[0]
    return name if name in type(body).accounts() else None
