"""The body of /v1/responses, and its conversion to a conversation."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from ...api import Engine
from ...model.grammar import Grammar
from .bodies import Message, SaidPart, Sampled, check_refusals
from .errors import ApiError, ListOf, of_validation, wrong_value
from .structured import ResponseFormat, grammar_of
from .tool_bodies import CalledFunction, Function, FunctionName, ToolCall, arguments_of


class _Item(BaseModel):
    model_config = ConfigDict(extra="allow")


class TextPart(SaidPart):
    """A part of an item's content: a text, or a refusal."""

    type: Literal["input_text", "output_text", "text", "refusal"]


def _text_of(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.said for part in content)


class MessageItem(_Item):
    """An item of the input that is a message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | ListOf[TextPart]

    @field_validator("content")
    @classmethod
    def _is_for_role(cls, content: Any, info: ValidationInfo) -> Any:
        check_refusals(content, info.data.get("role"))
        return content


class CallItem(_Item):
    """An item of the input that is a call which the model made before."""

    call_id: StrictStr
    name: StrictStr
    arguments: StrictStr

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, text: str) -> str:
        arguments_of(text)
        return text


class CallOutputItem(_Item):
    """An item of the input that is the result of a call."""

    call_id: StrictStr
    output: StrictStr | ListOf[TextPart]


class ThoughtPart(_Item):
    """A part of the model's thoughts."""

    text: StrictStr


class ReasoningItem(_Item):
    """An item of the input that is the model's thoughts before."""

    content: ListOf[ThoughtPart] | None = None


_KINDS: Mapping[str, type[_Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}


class ResponseTool(_Item):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None

    def function(self) -> Function:
        """Returns the function in the form of chat completions."""
        return Function(name=self.name, description=self.description, parameters=self.parameters)


class TextFormat(_Item):
    """The form that the text must have. Unlike in chat completions, the schema is a field here, not
    in an object of its own.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: StrictStr | None = None
    schema_: Any = Field(default=None, alias="schema")


class TextOptions(_Item):
    """The form of the answer's text."""

    format: TextFormat | None = None


class ResponseBody(Sampled):
    """The body of /v1/responses."""

    input: Annotated[StrictStr | ListOf[dict[str, Any]], Field(min_length=1)]
    instructions: StrictStr | None = None
    max_output_tokens: Annotated[StrictInt, Field(ge=1, lt=2**32)] | None = None
    tools: ListOf[ResponseTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    text: TextOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    user: StrictStr | None = None
    truncation: StrictStr | None = None
    background: StrictBool | None = None
    previous_response_id: Any = None
    conversation: Any = None

    def refuse_what_needs_a_store(self) -> None:
        """Raises ApiError if the body has fields that only a server which stores responses can
        support.
        """
        told = "null: this server keeps no responses; give the whole conversation as input"
        if self.previous_response_id is not None:
            raise wrong_value("previous_response_id", self.previous_response_id, told)
        if self.conversation is not None:
            raise wrong_value("conversation", self.conversation, told)
        if self.background:
            raise wrong_value("background", True, "false: this server keeps no responses")
        if self.truncation not in (None, "disabled"):
            raise wrong_value("truncation", self.truncation, "'disabled'")

    def format(self) -> dict[str, Any]:
        """Returns the form that the text must have, as the body gives it."""
        if self.text is None or self.text.format is None:
            return {"type": "text"}
        return self.text.format.model_dump(by_alias=True, exclude_unset=True)

    async def grammar_of_text(self, engine: Engine) -> dict[str, Grammar]:
        """Returns the grammar of text.format, as grammar_of() does. If that is absent, reads the
        fields that other endpoints have.
        """
        form = self.text and self.text.format
        if not form or form.type == "text":
            return await grammar_of(engine, self)
        made: dict[str, Any] = {"type": form.type}
        if form.type == "json_schema":
            made["json_schema"] = {"schema": form.schema_}
        body = self.model_copy(update={"response_format": ResponseFormat.model_validate(made)})
        try:
            return await grammar_of(engine, body)
        except ApiError as error:
            # The error names the field of chat completions. Replaces it with this body's field.
            names = ("response_format.json_schema", "response_format")
            name = next((each for each in names if (error.param or "").startswith(each)), None)
            if name is None:
                raise
            param = str(error.param).replace(name, "text.format")
            message = str(error).replace(name, "text.format")
            raise ApiError(error.status, message, param=param) from None

    def messages(self) -> list[Message]:
        """Returns the conversation in the form of chat completions.

        Raises:
            ApiError: An item of the input is wrong.
        """
        found: list[Message] = []
        if self.instructions:
            found.append(Message(role="system", content=self.instructions))
        if isinstance(self.input, str):
            return [*found, Message(role="user", content=self.input)]
        thought: str | None = None
        for index, given in enumerate(self.input):
            item = _item(given, f"input[{index}]")
            if isinstance(item, ReasoningItem):
                thought = "".join(part.text for part in item.content or []) or None
            elif isinstance(item, MessageItem):
                message = Message(role=item.role, content=_text_of(item.content))
                if item.role == "assistant":
                    message.reasoning_content, thought = thought, None
                found.append(message)
            elif isinstance(item, CallItem):
                # An answer's calls and its text become one message.
                if not found or found[-1].role != "assistant":
                    found.append(Message(role="assistant", reasoning_content=thought))
                    thought = None
                function = CalledFunction(name=item.name, arguments=item.arguments)
                call = ToolCall(id=item.call_id, function=function)
                found[-1].tool_calls = [*(found[-1].tool_calls or []), call]
            elif isinstance(item, CallOutputItem):
                text = _text_of(item.output)
                found.append(Message(role="tool", content=text, tool_call_id=item.call_id))
        if not found:
            raise wrong_value("input", self.input, "a text, or items with a message")
        return found


def _item(given: dict[str, Any], at: str) -> _Item:
    """Validates an item of the input. Raises ApiError if it is wrong.

    Args:
        given: The item in the body.
        at: The item's path in the body, for errors.
    """
    kind = given.get("type", "message")
    if not isinstance(kind, str) or kind not in _KINDS:
        known = ", ".join(map(repr, _KINDS))
        raise wrong_value(f"{at}.type", kind, f"one of {known}")
    try:
        return _KINDS[kind].model_validate(given)
    except ValidationError as error:
        raise of_validation(error, at) from None
