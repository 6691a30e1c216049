"""Conversations: records become messages, and messages become tokens with a mask of the ones that count in the loss.

A conversation goes through the tokenizer's own chat template. Its assistant turns count, as the template's marks
`{% generation %}` say. A template without marks is rendered up to each assistant turn and with it: what was added is
the turn. `transformers` is imported only where a tokenizer is opened.

A template is a stranger's program: it runs in a process of its own, with a bound on memory and time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, TypedDict, cast
from weakref import finalize

import numpy as np

from elastic_ring.data.packing import Counted, Tokens
from elastic_ring.data.preparation import MAX_RECORD_BYTES
from elastic_ring.data.tokenizer import open_saved, open_tokenizer
from elastic_ring.errors import ElasticRingError
from elastic_ring.files import cut, plain_json

ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
SHAREGPT = {**ROLES, "human": "user", "gpt": "assistant"}
"""The role for each value of `role` or of ShareGPT's `from`."""
IN_LOSS = ("weight", "train", "loss")
"""Keys of a message that say whether it counts: 0 or false leaves it out."""
RULES = 3
"""Version of what records become. Raise it with every change: no preparation then goes on under other rules."""
CALL = {"place": "here"}
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
RENDER_S, RENDER_BYTES = 5.0, 1 << 30
"""CPU time and memory, beside its process's own, of one rendering of a template."""
BEGIN_S, ANSWER_S = 300.0, 60.0
"""For the process to begin, on a cold disk, too, and to answer."""
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


# ------------------------------------------------------------ a template in a process of its own


Rendered = tuple[str, list[tuple[int, int]]]
"""What a template writes, and from where to where it marks that."""


_IDLE: dict[int, Connection] = {}
"""The way to the process that renders for this one, by this one's PID: a fork has none."""


def _begin() -> Connection:
    """The way to a new process, which is killed once the connection is dropped. Raises ElasticRingError where none
    begins."""
    ours, theirs = Pipe()
    call = f"render({theirs.fileno()}, {RENDER_S}, {RENDER_BYTES})"
    program = f"import sys; sys.path = sys.argv[1:]; from {__name__} import render; {call}"
    with theirs:
        command, own = [sys.executable, "-c", program, *sys.path], os.getpid()
        try:
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        except OSError as error:
            raise ElasticRingError(f"no process for chat templates begins: {error}") from error

    def end() -> None:
        if os.getpid() == own:
            process.kill()
            process.wait()

    finalize(ours, end)
    try:
        if ours.poll(BEGIN_S):
            ours.recv()  # it has imported what it needs
            return ours
    except (OSError, EOFError):
        process.wait()
    raise ElasticRingError(
        f"the process for chat templates did not begin within {BEGIN_S:g} s, or ended (exit status {process.poll()}): "
        "its own lines are above"
    )


def render(descriptor: int, most_s: float, most_bytes: int) -> None:
    """Render what is asked for on a connection until it is dropped; end where a template goes beyond its bounds."""
    from transformers.utils.chat_template_utils import render_jinja_template

    own_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most_bytes = own_bytes + most_bytes
    resource.setrlimit(
        resource.RLIMIT_AS, (most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard),) * 2
    )
    connection = Connection(descriptor)
    with suppress(EOFError, MemoryError):
        connection.send("ready")
        while True:
            request = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, most_s)  # whose signal ends the process
            try:
                (text,), spans = render_jinja_template(**request)
                if len(text) > MAX_RECORD_BYTES:
                    return
                answer: object = text, [*spans, []][0]
            except MemoryError:
                return
            except Exception as error:  # templates raise what they like
                answer = cut(f"{type(error).__name__}: {error}", 500)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(answer)


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
        self._where = where
        self._way_out = ("" if self._has_marks else PUT_MARKS) + "leave such conversations out"
        self._arguments = self._kind_of_arguments()
        identity = [RULES, plain.sha256, template, self._tokenizer.special_tokens_map]
        self.sha256 = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def encode(self, conversations: Sequence[bytes]) -> list[tuple[Tokens, Counted]]:
        """The tokens of each without the end of a document, and which of them and of that end count. The end counts
        where the template has written it itself. Raises ValueError for a conversation without counted tokens, and what
        the template raises."""
        return [self._encode(**plain_json(conversation)) for conversation in conversations]

    def _encode(self, messages: list[Message], turns: list[int], tools: list[Any] | None) -> tuple[Tokens, Counted]:
        masks: list[Any] = []
        messages = [_with_arguments(message, self._arguments) for message in messages]
        if self._has_marks:
            text, spans = self._rendered(messages, tools)
            encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ids = encoding["input_ids"]
            begins, ends = np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
            edges = np.asarray([*spans, (len(text) + 1,) * 2], dtype=np.int64).T
            masks = [ends > edges[0][np.searchsorted(edges[1], begins, side="right")]]  # the first that is not over
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
        question: Message = {"role": "user", "content": "Look."}
        turns = [question, cast(Message, {"role": "assistant", "content": "", "tool_calls": [call]})]
        try:
            return self._rendered(turns)[0]
        except ValueError:
            if os.getpid() not in _IDLE:  # it went beyond its bounds
                raise
            return None

    def _rendered(self, messages: Sequence[Message], tools: list[Any] | None = None, asks: bool = False) -> Rendered:
        """`asks`: for the beginning of an answer. Raises ValueError for what it raises, and beyond its bounds."""
        request = {
            **self._tokenizer.special_tokens_map,
            "conversations": [[{key: part for key, part in m.items() if part is not None} for m in messages]],
            "tools": tools,
            "chat_template": self._tokenizer.get_chat_template(None, tools),
            "return_assistant_tokens_mask": self._has_marks,
            "add_generation_prompt": asks,
        }
        renderer, answer = _IDLE.pop(os.getpid(), None) or _begin(), None
        with suppress(OSError, EOFError):
            renderer.send(request)
            answer = renderer.recv() if renderer.poll(ANSWER_S) else None
        if answer is None:
            raise ValueError(
                f"tokenizer={self._where!r}: its chat template takes over {RENDER_S:g} s, {RENDER_BYTES >> 20} MiB of "
                f"memory or {MAX_RECORD_BYTES >> 20} MiB of text for a conversation: mend it, or leave such ones out"
            )
        _IDLE[os.getpid()] = renderer
        if isinstance(answer, str):
            raise ValueError(answer)
        return cast(Rendered, answer)

    def _by_prefixes(
        self, messages: list[Message], turns: Sequence[int], tools: list[Any] | None
    ) -> tuple[list[int], Counted]:
        """The tokens, and which of them the `turns` add to the text before each."""
        texts = [self._rendered(messages, tools)[0]]
        for turn in turns:
            texts.append(self._rendered(messages[:turn], tools, asks=True)[0] if turn else "")
            texts.append(self._rendered(messages[: turn + 1], tools)[0])
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
