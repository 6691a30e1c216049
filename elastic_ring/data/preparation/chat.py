"""Conversations: records become messages, and messages become tokens with a mask of the ones that count in the loss.

A conversation goes through the tokenizer's own chat template. Its assistant turns count, as the template's marks
`{% generation %}` say. A template without marks is rendered up to each assistant turn and with it: what was added is
the turn. `transformers` is imported only where a tokenizer is opened.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypedDict, cast

import numpy as np

from elastic_ring.data.packing import Counted, Tokens
from elastic_ring.data.tokenizer import open_saved, open_tokenizer
from elastic_ring.files import plain_json

ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
SHAREGPT = {**ROLES, "human": "user", "gpt": "assistant"}
"""The role for each value of `role` or of ShareGPT's `from`."""
IN_LOSS = ("weight", "train", "loss")
"""Keys of a message that say whether it counts: 0 or false leaves it out."""
RULES = 3
"""Version of what records become. Raise it with every change: no preparation then goes on under other rules."""
CALL = {"place": "here"}
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
PUT_MARKS = "put {% generation %} and {% endgeneration %} around the assistant's text in the template, or "


# ------------------------------------------------------------ from records to messages


class Message(TypedDict):
    """A message that the chat template sees; records may have more keys, as `tool_calls`."""

    role: str
    content: str | None


class Conversations:
    """Records that are conversations. A document is one as JSON: its messages, the numbers of those that count, and
    the tools that it may call."""

    is_text = False
    columns: tuple[str, ...] = ("messages", "conversations", "prompt")
    description = "a conversation"

    def document(self, record: Any) -> bytes:
        """Raises KeyError for a record without a conversation, ValueError for one that cannot be trained on."""
        if not isinstance(record, Mapping):
            raise ValueError(f"it is a {type(record).__name__}")
        column = next((name for name in self.columns if record.get(name) is not None), None)
        if column is None:
            raise KeyError(column)
        prompt = _messages(record[column], "user") if column == "prompt" else []
        rest = _messages(record.get("completion"), "assistant") if column == "prompt" else _messages(record[column])
        if not rest:
            raise ValueError("it has no messages")
        if all(message["role"] != "assistant" for message, _ in rest):
            raise ValueError("it has no assistant turn, so that nothing counts in the loss")
        messages = [message for message, _ in prompt + rest]
        system = record.get("system")
        if not isinstance(system, str | None):
            raise ValueError(f"its system is a {type(system).__name__} and no text")
        if system and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": system})
        elif system and messages[0]["content"] != system:
            raise ValueError("its system and the system message in its list differ: keep one of them")
        first = len(messages) - len(rest)
        turns = [at for at, (message, counts) in enumerate(rest, first) if counts and message["role"] == "assistant"]
        if not turns:
            raise ValueError("nothing counts in the loss: its assistant turns are all marked so; leave the record out")
        tools = _without_nulls(record.get("tools"))
        if tools is not None and not isinstance(tools, list):
            raise ValueError(f"its tools are a {type(tools).__name__} and no list")
        return json.dumps({"messages": messages, "turns": turns, "tools": tools}, ensure_ascii=False).encode()


def _messages(value: Any, role: str = "") -> list[tuple[Message, bool]]:
    """The messages of a list, and whether each may count in the loss; text is one message of `role`."""
    if role and isinstance(value, str):
        return [({"role": role, "content": value}, True)]
    if not isinstance(value, list):
        raise ValueError(f"a list of messages is needed where it has {type(value).__name__}")
    return [_message(number, turn) for number, turn in enumerate(value, 1)]


def _message(number: int, turn: Any) -> tuple[Message, bool]:
    if not isinstance(turn, Mapping):
        raise ValueError(f"message {number} is a {type(turn).__name__}")
    turn = _without_nulls(turn)
    keys, roles = (("from", "value"), SHAREGPT) if "from" in turn else (("role", "content"), ROLES)
    role, content = (turn.pop(key, None) for key in keys)
    if not isinstance(role, str) or role not in roles:
        raise ValueError(f"message {number} has the role {role!r}: known are {', '.join(roles)}")
    if not isinstance(content, str) and not (content is None and "tool_calls" in turn):
        raise ValueError(f"message {number} has {type(content).__name__} and no text in it")
    flags = {key: turn.pop(key) for key in IN_LOSS if key in turn}  # which no template sees
    for key, flag in flags.items():
        if flag not in (0, 1):  # False and True are
            raise ValueError(f"message {number} has {key}={flag!r}: 0 or false leaves it out of the loss, 1 counts it")
    return {**turn, "role": roles[role], "content": content}, all(flags.values())


def _with_arguments(message: Message, kind: type | None) -> Message:
    """The message with the arguments of its calls as the template takes them. Records have them as a mapping, or as
    OpenAI's text of one, which a template that writes JSON would put in quotes once more."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or kind is None:
        return message
    return cast(Message, {**message, "tool_calls": [_with_call_arguments(call, kind) for call in calls]})


def _with_call_arguments(call: Any, kind: type) -> Any:
    if not isinstance(call, Mapping):
        return call
    if "function" in call:
        return {**call, "function": _with_call_arguments(call["function"], kind)}
    arguments = call.get("arguments")
    if isinstance(arguments, str) and kind is dict:
        try:
            parsed = plain_json(arguments)
        except ValueError:
            return call
        return {**call, "arguments": parsed} if isinstance(parsed, Mapping) else call
    if isinstance(arguments, Mapping) and kind is str:
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return call


def _without_nulls(value: Any) -> Any:
    """A value without fields that are null, which a table has in every row where one row has them."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


# ------------------------------------------------------------ from messages to tokens


class ChatTokenizer:
    """The chat template of a tokenizer of `transformers`. `sha256` identifies what it does."""

    def __init__(self, where: str, end_of_document: str | None) -> None:
        """Raises ValueError for a folder without a tokenizer or without a chat template."""
        plain = open_tokenizer(where, end_of_document)
        self._tokenizer = open_saved(where)
        self._tokenizer.model_max_length = int(1e30)  # it would warn of long ones, which are packed as others are
        self._end = plain.end_of_document
        try:
            template = self._tokenizer.get_chat_template()
        except ValueError as error:  # none, or several of which none is the default
            raise ValueError(
                f"tokenizer={where!r}: has no chat template, or none that is its default: write one to its folder "
                "(chat_template.jinja), or give the tokenizer of a model that chats"
            ) from error
        self._has_marks = bool(MARKS.search(template)) and self._tokenizer.is_fast
        self._way_out = ("" if self._has_marks else PUT_MARKS) + "leave such conversations out"
        self._arguments = self._kind_of_arguments()
        identity = [RULES, plain.sha256, template, self._tokenizer.special_tokens_map]
        self.sha256 = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def encode(self, conversations: Sequence[bytes]) -> list[tuple[Tokens, Counted]]:
        """The tokens of each without the end of a document, and which of them and of that end count. The end counts
        where the template has written it itself. Raises ValueError for a conversation without counted tokens, and what
        the template raises."""
        return [self._encode(**plain_json(conversation, len(conversation))) for conversation in conversations]

    def _encode(self, messages: list[Message], turns: list[int], tools: list[Any] | None) -> tuple[Tokens, Counted]:
        masks: list[Any] = []
        messages = [_with_arguments(message, self._arguments) for message in messages]
        if self._has_marks:
            encoding = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            ids, masks = encoding["input_ids"], [encoding["assistant_masks"]]
        if not masks or len(turns) < sum(message["role"] == "assistant" for message in messages):
            ids, in_turns = self._by_prefixes(messages, turns, tools)
            masks.append(in_turns)
        tokens, counted = np.asarray(ids, dtype=np.int32), np.all(masks, axis=0)
        if not counted.any():
            raise ValueError("no token counts: its assistant turns are empty, or {% generation %} marks other turns")
        if tokens[-1] == self._end:
            return tokens[:-1], counted
        return tokens, np.append(counted, False)

    def _kind_of_arguments(self) -> type | None:
        """Whether the template takes a call's arguments as a mapping, as transformers documents it, or joins them as
        text. None where neither is known; they stay as a record has them."""
        if str(CALL) not in (self._with_call(CALL) or str(CALL)):
            return dict
        return str if self._with_call(json.dumps(CALL)) is not None else None

    def _with_call(self, arguments: object) -> str | None:
        """What the template writes of a call with these arguments; None where it refuses it."""
        call = {"id": "000000000", "type": "function", "function": {"name": "look", "arguments": arguments}}
        turns = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            return str(self._tokenizer.apply_chat_template(turns, tokenize=False))
        except Exception:  # templates raise what they like
            return None

    def _by_prefixes(
        self, messages: list[Message], turns: Sequence[int], tools: list[Any] | None
    ) -> tuple[list[int], Counted]:
        """The tokens, and which of them the `turns` add to the text before each."""
        render = partial(self._tokenizer.apply_chat_template, tools=tools, tokenize=False)
        texts = [render(messages)]
        for turn in turns:
            texts.append(render(messages[:turn], add_generation_prompt=True) if turn else "")
            texts.append(render(messages[: turn + 1]))
        whole, *parts = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        counted = np.zeros(len(whole), dtype=np.bool_)
        if turns[0] == 0 and not self._has_marks:
            raise ValueError(
                f"it begins with an assistant turn, before which the chat template writes nothing: {self._way_out}"
            )
        for number, turn in enumerate(turns):
            before, after = parts[2 * number : 2 * number + 2]
            is_prefix = (before or not turn) and len(before) <= len(after) and whole[: len(before)] == before
            if not is_prefix or whole[: len(after)] != after:
                raise ValueError(
                    f"what the chat template writes up to message {turn + 1} is not how it begins with more messages, "
                    f"so that nothing tells which tokens are the assistant's: {self._way_out}"
                )
            counted[len(before) : len(after)] = True
        return whole, counted
