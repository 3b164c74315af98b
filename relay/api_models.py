"""What a request to the API may hold, checked by pydantic, and the sessions that it becomes.

Each field is honoured or refused with an error that names it. NEUTRAL lists what OpenAI's API has and this one has not:
such a field may be there with a value that asks for nothing. Ranges are those of `wire/sampling.py` and
`wire/messages.py`, which check them again at every hop.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator

from relay.api_errors import ApiError
from wire.fields import shown
from wire.messages import MAX_LOGPROBS, MAX_POSITION, MAX_STOPS, ChatMessage, OpenSession, Tokenize
from wire.sampling import MAX_SEED, Sampling

MAX_ANSWERS = 32
"""Sessions that one HTTP request may open: prompts times n."""
COMPLETION_MAX_TOKENS = 16
"""What OpenAI's /v1/completions takes where max_tokens is left out. A chat answer goes on to the context limit."""
TEXT_FORMAT = {"type": "text"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, TEXT_FORMAT),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}
EXPECTED = {
    "prompt": "must be a string, a list of token ids, or a list of either",
    "stop": f"must be a string or a list of at most {MAX_STOPS} strings",
    "content": "must be a string or a list of text parts",
}
ROLES = Literal["system", "developer", "user", "assistant"]
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class FirstFault(FailFast):
    """Of a list, the first bad entry is told: an error for each of a megabyte's holds up the event loop for seconds."""

    __hash__ = object.__hash__  # a union of types hashes them


Many = Annotated[list[T], FirstFault()]


class Strict(BaseModel):
    """No unknown field, no number in a string. A null asks for nothing, whatever field it stands in."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, data: Any) -> Any:
        """What is to be checked: of the unknown fields one is enough to refuse all, and a body may hold 100,000."""
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        given = {
            name: value
            for name, value in data.items()
            if name in fields and (value is not None or fields[name].is_required())
        }
        unknown = next((name for name, value in data.items() if name not in fields and value is not None), None)
        return given if unknown is None else {**given, unknown: data[unknown]}


class TextPart(Strict):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class Turn(Strict):
    """One message. OpenAI's "developer" is its newer name for "system", which is what chat templates know."""

    role: ROLES
    content: str | Many[TextPart]
    name: None = None
    refusal: None = None
    tool_calls: None = None

    def chat_message(self) -> ChatMessage:
        """As the wire has it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return ChatMessage(role="system" if self.role == "developer" else self.role, content=text)


class StreamOptions(Strict):
    """What a stream carries beyond the answer."""

    include_usage: bool = False


class Generation(Strict):
    """What chat and plain completions have in common.

    Attributes:
        user: stands in the relay's log beside the session; nothing else is done with it.
        speculate: False for the target alone.
        return_sources: have each chunk of a stream say where its tokens came from.
    """

    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    stop: str | Many[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=256)
    speculate: bool = True
    return_sources: bool = False

    @property
    def limit(self) -> int:
        """Most tokens of an answer; 0 for up to the context limit."""
        return self.max_tokens or 0

    @property
    def num_logprobs(self) -> int | None:
        """Top log-probabilities to report for each token, None for none at all."""
        raise NotImplementedError

    @property
    def num_answers(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, seed: int) -> Sampling:
        """The parameters of one answer. A temperature that is left out is 1, as in OpenAI's API.

        Raises:
            ProtocolError: one is out of its range.
        """
        given = {
            name: value
            for name in ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
                         "min_tokens")
            if (value := getattr(self, name)) is not None
        }  # fmt: skip
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            # vLLM's -1 and 0 both mean all.
            top_k=0 if self.top_k in (None, -1) else self.top_k,
            seed=seed,
            **given,
        )

    def check(self) -> None:
        """What concerns several fields.

        Raises:
            ApiError: they contradict each other.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options", code="invalid_value")
        if self.return_sources and not self.stream:
            raise ApiError(400, "return_sources needs stream to be true", param="return_sources", code="invalid_value")
        if self.limit and (self.min_tokens or 0) > self.limit:
            text = f"min_tokens must be at most max_tokens, {self.limit}, got {self.min_tokens}"
            raise ApiError(400, text, param="min_tokens", code="invalid_value")

    def sessions(self, prompts: Sequence[dict[str, Any]]) -> list[OpenSession]:
        """The requests to the verify node: each prompt n times, under seeds that count up.

        Args:
            prompts: each a field of `OpenSession` that gives a prompt.

        Raises:
            ApiError: they are too many.
            ProtocolError: a value is out of its range.
        """
        if len(prompts) * self.num_answers > MAX_ANSWERS:
            text = f"n times the number of prompts must be at most {MAX_ANSWERS}, got {self.num_answers}"
            raise ApiError(400, f"{text} times {len(prompts)}", param="n", code="invalid_value")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        first_seed = secrets.randbits(31) if self.seed is None else self.seed
        return [
            OpenSession(
                session=uuid.uuid4().hex,
                model=self.model,
                sampling=self.sampling(nth_seed(first_seed, number)),
                max_tokens=self.limit,
                stop=stop,
                logprobs=self.num_logprobs,
                speculate=self.speculate,
                ignore_eos=self.ignore_eos,
                **prompt,
            )
            for prompt in prompts
            for number in range(self.num_answers)
        ]


def nth_seed(seed: int, number: int) -> int:
    """The seed of answer `number` of a request: answer 0 is what n=1 gives; past the end it goes on at the start."""
    return (seed + number + MAX_SEED) % (2 * MAX_SEED + 1) - MAX_SEED if number else seed


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: Many[Turn] = Field(min_length=1)
    # Fields with other names on the wire have their ranges here too, so that an error names them as they were given.
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_POSITION)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def limit(self) -> int:
        """See `Generation.limit`."""
        return self.max_completion_tokens or self.max_tokens or 0

    @property
    def num_logprobs(self) -> int | None:
        """See `Generation.num_logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """See `Generation.check`."""
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            text = (
                f"max_completion_tokens is {self.max_completion_tokens} and max_tokens is {self.max_tokens}: give one"
            )
            raise ApiError(400, text, param="max_completion_tokens", code="invalid_value")

    def requests(self) -> list[OpenSession]:
        """See `Generation.sessions`."""
        return self.sessions([{"messages": tuple(turn.chat_message() for turn in self.messages)}])


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: str | Many[int] | Many[str] | Many[Many[int]]
    logprobs: int | None = Field(None, ge=0)

    @property
    def limit(self) -> int:
        """See `Generation.limit`."""
        return self.max_tokens or COMPLETION_MAX_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        """See `Generation.num_logprobs`."""
        return self.logprobs

    def requests(self) -> list[OpenSession]:
        """See `Generation.sessions`."""
        prompt = self.prompt
        prompts: list[Any] = [prompt] if isinstance(prompt, str) or is_ids(prompt) else list(prompt)
        if not prompts:
            raise ApiError(400, "prompt must not be an empty list", param="prompt", code="empty_prompt")
        return self.sessions(
            [{"prompt": one} if isinstance(one, str) else {"prompt_ids": tuple(one)} for one in prompts]
        )


def is_ids(prompt: Sequence[Any]) -> bool:
    """Whether a list is one prompt of ids and not several prompts."""
    return bool(prompt) and isinstance(prompt[0], int)


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or a conversation by the checkpoint's chat template."""

    model: str = ""
    prompt: str | None = None
    messages: Many[Turn] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")
        return self

    def requests(self) -> list[Tokenize]:
        """The request to the verify node."""
        turns = None if self.messages is None else tuple(turn.chat_message() for turn in self.messages)
        return [Tokenize(session=uuid.uuid4().hex, model=self.model, prompt=self.prompt, messages=turns)]


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str = ""
    tokens: Many[int]

    def requests(self) -> list[Tokenize]:
        """The request to the verify node."""
        return [Tokenize(session=uuid.uuid4().hex, model=self.model, prompt_ids=tuple(self.tokens))]


def parse(kind: type[M], body: bytes) -> M:
    """The request in a body.

    Raises:
        ApiError: 400, naming the field, its value and what was expected.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise ApiError(400, f"the body is not JSON: {exc}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, f"the body must be a JSON object, got {shown(data)}", code="invalid_json")
    for name, neutral in NEUTRAL.items():
        if name not in data or name in kind.model_fields:
            continue
        value = data.pop(name)
        if value not in neutral:
            allowed = ", ".join(orjson.dumps(each).decode() for each in neutral)
            text = f"{name} is not supported here: leave it out (or give {allowed}), got {shown(value)}"
            raise ApiError(400, text, param=name, code="unsupported_parameter")
    try:
        request = kind.model_validate(data)
    except ValidationError as exc:
        raise _api_error(exc, data) from None
    return request


def _api_error(exc: ValidationError, data: Any) -> ApiError:
    """The first thing that is wrong, told once: of a union, pydantic tells it for each of its members."""
    error = exc.errors(include_url=False)[0]
    path, value = "", data
    expected = None
    for part in error["loc"]:
        path += (
            f".{part}"
            if path and str(part).isidentifier()
            else part
            if isinstance(part, str) and not path
            else f"[{part}]"
        )
        value = value[part] if isinstance(part, int) else value.get(part)
        expected = EXPECTED.get(str(part))
        if expected is not None:
            break
    param = path or None
    match error["type"]:
        case "extra_forbidden" if expected is None or len(error["loc"]) == 1:
            return ApiError(400, f"{path} is not a parameter of this endpoint", param=param, code="unknown_parameter")
        case "missing" if error["loc"][-1] == part:
            return ApiError(400, f"{path} is required", param=param, code="missing_required_parameter")
        case "value_error":
            return ApiError(400, str(error["ctx"]["error"]), param=param, code="invalid_value")
        case "too_short" | "too_long":
            expected = (
                f"must have {'at least' if error['type'] == 'too_short' else 'at most'} "
                + str(error["ctx"].get("min_length", error["ctx"].get("max_length")))
                + " entries"
            )
        case "none_required":
            expected = "is not supported here: leave it out"
        case "string_too_long":
            expected = f"must have at most {error['ctx']['max_length']} characters"
    message = expected or error["msg"].replace("Input should", "must")
    return ApiError(400, f"{path} {message}, got {shown(value)}", param=param, code="invalid_value")
