"""The chat model: LangChain's interface over any OpenAI-compatible server, made for local multi-agent serving."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, Self, cast

from langchain_core.callbacks import (
    AsyncCallbackManager,
    AsyncCallbackManagerForLLMRun,
    CallbackManager,
    CallbackManagerForLLMRun,
)
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig, RunnableMap, RunnablePassthrough, RunnableSequence
from langchain_core.runnables.config import ensure_config
from langchain_core.utils.utils import LC_ID_PREFIX
from langchain_openai.chat_models.base import BaseChatOpenAI
from pydantic import Field, PrivateAttr, SecretStr, model_validator

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.chat.call import Call, aplay, play
from pancake_langgraph.chat.facts import CheckContext, ServedProfile, ServerFacts
from pancake_langgraph.chat.link import Link, LinkConfig
from pancake_langgraph.chat.payload import lay_out, with_extras
from pancake_langgraph.chat.structured import described, parser_for
from pancake_langgraph.chat.tokens import TokenCounting
from pancake_langgraph.chat.watch import RunProbe, Watch
from pancake_langgraph.config.address import require_http_address
from pancake_langgraph.config.env import runtime_requested, settings_from_env
from pancake_langgraph.prompts.tool_order import ToolOrder
from pancake_langgraph.tiers.naming import KVCodec

#: Keyword that carries a `RunProbe` through LangChain's own methods; never sent, traced or cached.
_PROBE = "pancake_probe"


class PancakeChatModel(TokenCounting, BaseChatOpenAI):
    """A chat model for servers that you run yourself (vLLM and other OpenAI-compatible ones).

    `PancakeChatModel(model="small", base_url="http://127.0.0.1:8000/v1")`.  The constructor does no I/O.  What is not
    given comes from `PANCAKE_MODEL`, `PANCAKE_BASE_URL` and `PANCAKE_API_KEY`; no variable of another provider is read.
    Every call streams from the server, whatever LangChain asks for, so that callbacks see a tool's name as soon as the
    model has written it.  One instance may serve any number of threads and event loops.

    Raises (from all calls):
        EngineError: one of the tree in `pancake_langgraph._errors`; no error of an HTTP library or SDK gets out.
    """

    model_name: str = Field(default="", alias="model")
    stream_usage: bool | None = True
    """Whether to ask for token counts in streams."""
    stream_chunk_timeout: float | None = None
    """Seconds between two pieces of an answer; `None` leaves it to `timeout`."""
    max_retries: int | None = 0
    """How often to send a call again when nothing of its answer had come (unreachable, 429, 5xx); never a 4xx."""
    check_context: CheckContext = "auto"
    """When to count a prompt before sending it: if it might not fit, always, or never.  Needs `max_tokens`."""
    send_reasoning_back: bool = False
    """Whether earlier reasoning goes back to the server, in `reasoning_content` and `reasoning`."""
    return_token_ids: bool = False
    """Whether to ask for token ids; observers get them, the message keeps only their number."""
    tool_order: ToolOrder = "first_seen"
    """How tools are laid out.  `first_seen` sends a set of tools in the order (and order of keys) in which this process
    sent it first: what other clients send where the app's order is constant, one stable prefix where it varies.
    `sorted` sorts tools and keys, so that processes agree, too; other bytes may mean other words.  `as_bound` leaves
    them alone."""
    strict_roles: bool = False
    """Whether to fit templates that allow one system message and no two equal roles in a row."""
    repair_tool_pairs: bool = True
    """Whether calls without a result get one that says so, and results without a call are dropped."""
    tool_call_id_style: Literal["as_is", "alnum9"] = "as_is"
    """`alnum9` maps every tool-call id to nine letters or digits, always the same ones."""
    cache_salt: str | None = None
    """Keeps this model's cached prefixes apart from others'."""
    kv_codec: KVCodec | None = None
    """How KV of this model's prompts is kept below the cache server's main memory: `exact`, or in 8 or 4 bits, which
    changes later answers a little.  `None`: as the tier does.  KV is shared only by models that say the same."""
    priority: int | None = None
    """Queue priority, where the server has one; smaller is served first."""

    _facts: ServerFacts | None = PrivateAttr(default=None)

    def __init__(self, **kwargs: Any) -> None:
        """Take the fields as keyword arguments.

        Raises:
            ConfigError: if there is no model name, or something is asked for that this wire cannot do.
        """
        super().__init__(**_with_defaults(kwargs))

    # -- construction: ours where the base class reads another provider's environment or opens its SDK ------------

    @model_validator(mode="before")
    @classmethod
    def validate_temperature(cls, values: dict[str, Any]) -> Any:
        """Keep the temperature, whatever the model is called."""
        return values

    @model_validator(mode="after")
    def validate_environment(self) -> Self:
        """Prepare the connection without opening it."""
        self.use_responses_api = False
        if self.profile is None:
            self.profile = cast("Any", ServedProfile(self.facts, self.model_name))
        return self

    def _resolve_model_profile(self) -> Any:
        return None  # set in `validate_environment`, where the connection is known

    def _use_responses_api(self, payload: dict[str, Any]) -> bool:
        return False

    def _link_config(self) -> LinkConfig:
        key = self.openai_api_key
        headers = dict(self.default_headers or {})
        if self.openai_organization:
            headers["OpenAI-Organization"] = self.openai_organization
        return LinkConfig(
            base_url=self.openai_api_base or "",
            api_key=key.get_secret_value() if isinstance(key, SecretStr) else (key or "EMPTY"),
            timeout=self.request_timeout,
            headers=headers,
            query=dict(self.default_query or {}),
            proxy=self.openai_proxy or None,
            client=self.http_client,
            async_client=self.http_async_client,
        )

    @property
    def facts(self) -> ServerFacts:
        """The connection, and what the server has said about itself; renewed when `base_url` or the key has changed."""
        config = self._link_config()
        if self._facts is None or self._facts.link.config != config:
            self._facts = ServerFacts(Link(config))
        return self._facts

    # -- identity -------------------------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "pancake-chat"

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return true: `langchain_core.load.dumps` saves the model, its key as a reference only.

        LangChain revives foreign classes when they are named:
        `loads(text, allowed_objects=[PancakeChatModel], valid_namespaces=["pancake_langgraph"])`.
        """
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Return the import path for loading."""
        return ["pancake_langgraph", "chat_model"]

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Where secrets come from when a saved model is loaded."""
        return {"openai_api_key": "PANCAKE_API_KEY"}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        kwargs.pop(_PROBE, None)
        params = cast("dict[str, Any]", super()._get_ls_params(stop=stop, **kwargs))
        params["ls_provider"] = "pancake"
        if isinstance(stops := params.get("ls_stop"), str):
            params["ls_stop"] = [stops]
        return params

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        kwargs.pop(_PROBE, None)
        return super()._get_invocation_params(stop=stop, **kwargs)

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        kwargs.pop(_PROBE, None)
        return super()._get_llm_string(stop=stop, **kwargs)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        messages = self._convert_input(input_).to_messages()
        extra = with_extras(self, kwargs)
        payload = super()._get_request_payload(messages, stop=stop, **kwargs)
        return lay_out(self, payload, messages, extra)

    def _call(self, messages: list[BaseMessage], stop: list[str] | None, probe: RunProbe, kwargs: Any) -> Call:
        usage = kwargs.pop("stream_usage", None)
        if self._should_stream_usage(usage, **kwargs):
            kwargs["stream_options"] = {**(kwargs.get("stream_options") or {}), "include_usage": True}
        payload = self._get_request_payload(messages, stop=stop, **{**kwargs, "stream": True})
        return Call.prepare(payload, self.facts, Watch(probe), self)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        probe = kwargs.pop(_PROBE, None) or RunProbe.of(run_manager)
        yield from play(self._call(messages, stop, probe, kwargs), run_manager)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        probe = kwargs.pop(_PROBE, None) or RunProbe.of(run_manager)
        async with aclosing(aplay(self._call(messages, stop, probe, kwargs), run_manager)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        probe = kwargs.pop(_PROBE, None) or RunProbe.of(run_manager)
        call = self._call(messages, stop, probe, kwargs)
        return _result(call, list(play(call, run_manager)), run_manager)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        probe = kwargs.pop(_PROBE, None) or RunProbe.of(run_manager)
        call = self._call(messages, stop, probe, kwargs)
        async with aclosing(aplay(call, run_manager)) as pieces:
            chunks = [chunk async for chunk in pieces]
        return _result(call, chunks, run_manager)

    # -- LangChain's own methods that call `_stream` without the run manager ---------------------------------------

    def _generate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        kwargs[_PROBE] = RunProbe.of(run_manager)
        return super()._generate_with_cache(messages, stop=stop, run_manager=run_manager, **kwargs)

    async def _agenerate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        kwargs[_PROBE] = RunProbe.of(run_manager)
        return await super()._agenerate_with_cache(messages, stop=stop, run_manager=run_manager, **kwargs)

    def stream(
        self,
        input: LanguageModelInput,  # noqa: A002  LangChain's name
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Stream the answer."""
        config = ensure_config(config)
        manager = CallbackManager.configure(config.get("callbacks"), self.callbacks, self.verbose)
        probe = RunProbe(manager.handlers)
        manager.add_handler(probe, inherit=False)
        yield from super().stream(input, {**config, "callbacks": manager}, stop=stop, **{**kwargs, _PROBE: probe})

    async def astream(
        self,
        input: LanguageModelInput,  # noqa: A002  LangChain's name
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """Stream the answer."""
        config = ensure_config(config)
        manager = AsyncCallbackManager.configure(config.get("callbacks"), self.callbacks, self.verbose)
        probe = RunProbe(manager.handlers)
        manager.add_handler(probe, inherit=False)
        chunks = super().astream(input, {**config, "callbacks": manager}, stop=stop, **{**kwargs, _PROBE: probe})
        async with aclosing(cast("Any", chunks)) as pieces:
            async for piece in pieces:
                yield piece

    # -- structured output ----------------------------------------------------------------------------------------

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: Literal["function_calling", "json_mode", "json_schema"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        tools: list[Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a runnable whose answers have the shape of `schema`.

        The default method lets the server enforce the schema while it decodes.

        Raises (when run):
            StructuredOutputError: if the answer is empty, cut short or does not fit, naming the finish reason.
        """
        base = super().with_structured_output(
            described(schema, method=method),
            method=method,
            include_raw=False,
            strict=strict,
            tools=tools,
            **kwargs,
        )
        model = cast("RunnableSequence[Any, Any]", base).first
        parser = parser_for(schema, method=method, tools_allowed=bool(tools))
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(parsed=_raw | parser, parsing_error=_nothing)
        failed = RunnablePassthrough.assign(parsed=_nothing)
        return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _with_defaults(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what the environment says, and shut out what the base class would read from it."""
    values = dict(kwargs)
    known = settings_from_env()
    for names, value in (
        (("base_url", "openai_api_base"), known.base_url),
        (("api_key", "openai_api_key"), known.api_key or "EMPTY"),
        (("model", "model_name"), known.model),
        (("openai_proxy",), ""),
        (("max_retries",), 0),
    ):
        if all(values.get(name) is None for name in names):
            values[names[0]] = value
            for name in names[1:]:
                values.pop(name, None)
    if not (values.get("model") or values.get("model_name")):
        raise ConfigError("model: got nothing, allowed is the name of a served model; give model= or set PANCAKE_MODEL")
    given = values.get("base_url")
    require_http_address("base_url", values.get("openai_api_base") if given is None else given)
    if (values.get("n") or 1) != 1:
        raise ConfigError(f"n: got {values['n']!r}, allowed is 1; use batch for several answers")
    if values.get("use_responses_api") or values.get("output_version") == "responses/v1":
        raise ConfigError("the Responses API is not supported; allowed is the chat completions API (leave it unset)")
    return values


def _result(call: Call, chunks: Sequence[ChatGenerationChunk], run_manager: Any) -> ChatResult:
    result = generate_from_stream(iter(chunks))
    message = result.generations[0].message
    if isinstance(message, AIMessage):
        call.answer.repair(message)
    if run_manager is not None:
        message.id = f"{LC_ID_PREFIX}-{run_manager.run_id}"
    result.llm_output = call.answer.llm_output()
    return result


def _raw(values: Mapping[str, Any]) -> Any:
    return values["raw"]


def _nothing(_: Any) -> None:
    return None


if runtime_requested():  # `PANCAKE_RUNTIME=1`: whoever uses this model is watched without a line of code
    from pancake_langgraph.runtime.environment import watch_environment

    watch_environment()
