"""Models of the requests' bodies: the fields that are read, and their types. Other fields are
ignored.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ...model.sample import MOST_ALTERNATIVES
from .errors import ListOf
from .structured import Structured
from .tool_bodies import Tool, ToolCall

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_MOST_BIAS, _MOST_PENALTY, _MOST_CHOICES, _MOST_STOPS = 100, 2, 16, 4
# The most ids in logit_bias. Each wrong one makes a validation error, so their number is limited.
_MOST_BIASED = 4096
Ids = Annotated[ListOf[Annotated[StrictInt, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")


class StreamOptions(_Body):
    """What a stream contains besides the answer."""

    include_usage: StrictBool | None = None


class Sampled(Structured):
    """The fields that all requests for answers have. A field that is null counts as missing."""

    model: StrictStr | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[StrictInt, Field(ge=1, le=_MOST_CHOICES)] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=0, lt=2**32)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, lt=2**32)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-_MOST_PENALTY, le=_MOST_PENALTY)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-_MOST_PENALTY, le=_MOST_PENALTY)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-_MOST_BIAS, le=_MOST_BIAS)]] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: (
        Annotated[StrictStr, Field(min_length=1)]
        | Annotated[
            ListOf[Annotated[StrictStr, Field(min_length=1)]], Field(max_length=_MOST_STOPS)
        ]
        | None
    ) = None
    kccl: StrictBool | None = None
    """Whether the events of a stream have a field `kccl` with each token's time."""

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _is_short(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > _MOST_BIASED:
            raise ValueError(f"has {len(given)} ids, must have at most {_MOST_BIASED}")
        return given


class SaidPart(_Body):
    """A part of a content: a text, or an assistant's refusal."""

    type: StrictStr
    text: StrictStr = ""
    refusal: StrictStr = ""

    @model_validator(mode="after")
    def _has_its_text(self) -> Self:
        name = "refusal" if self.type == "refusal" else "text"
        if name not in self.model_fields_set:
            raise ValueError(f"{name} is missing, must be given")
        return self

    @property
    def said(self) -> str:
        """Returns the text of either kind of part."""
        return self.refusal if self.type == "refusal" else self.text


def check_refusals(content: Any, role: str | None) -> None:
    """Raises ValueError if a content has a refusal and the role is not "assistant"."""
    parts = content if isinstance(content, list) else []
    if role != "assistant" and any(each.type == "refusal" for each in parts):
        raise ValueError("has a refusal, must have none: only an assistant's content may")


class Part(SaidPart):
    """A part of a message's content."""

    type: Literal["text", "refusal"]


class Message(_Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | ListOf[Part] | None = None
    reasoning_content: StrictStr | None = None
    tool_calls: ListOf[ToolCall] | None = None
    tool_call_id: StrictStr | None = None
    name: StrictStr | None = None

    @field_validator("content")
    @classmethod
    def _is_for_role(cls, content: Any, info: ValidationInfo) -> Any:
        check_refusals(content, info.data.get("role"))
        return content

    def given(self) -> dict[str, Any]:
        """Returns the message in the form that chat templates take."""
        role = "system" if self.role == "developer" else self.role
        content = self.content
        if isinstance(content, list):
            content = "".join(part.said for part in content)
        found: dict[str, Any] = {"role": role, "content": content or ""}
        if role == "assistant" and self.reasoning_content:
            found["reasoning_content"] = self.reasoning_content
        if role == "assistant" and self.tool_calls:
            found["tool_calls"] = [each.given() for each in self.tool_calls]
        if role == "tool":
            found |= {"tool_call_id": self.tool_call_id, "name": self.name}
        return found


class Chat(Sampled):
    """The body of /v1/chat/completions."""

    messages: Annotated[ListOf[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1, lt=2**32)] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1, lt=2**32)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ListOf[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None


class Completion(Sampled):
    """The body of /v1/completions."""

    prompt: (
        StrictStr
        | Ids
        | Annotated[ListOf[StrictStr], Field(min_length=1)]
        | Annotated[ListOf[Ids], Field(min_length=1)]
    )
    echo: StrictBool | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    suffix: StrictStr | None = None
    best_of: StrictInt | None = None

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts as a list, even if there is only one."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class Tokenize(_Body):
    """The body of /tokenize: a text, or a conversation."""

    prompt: StrictStr | None = None
    messages: Annotated[ListOf[Message], Field(min_length=1)] | None = None
    add_special_tokens: StrictBool = True
    add_generation_prompt: StrictBool = True


class Detokenize(_Body):
    """The body of /detokenize."""

    tokens: ListOf[Annotated[StrictInt, Field(ge=0, lt=2**31)]]
