"""Conversations: records become messages, and messages become tokens with a mask of the ones that count in the loss.

A conversation goes through the tokenizer's own chat template. Its assistant turns count, as the template's marks
`{% generation %}` say. A template without marks is rendered up to each assistant turn and with it: what was added is
the turn. Where a template writes earlier turns anew, as those do that drop what was thought, a conversation becomes
several documents, so that each turn counts as it is generated. `transformers` is imported only where a tokenizer is
opened.

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
from functools import cached_property
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

CALLS = "function_call"
ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
ROLES |= {CALLS: "assistant", "observation": "tool", "function": "tool"}
SHAREGPT = {**ROLES, "human": "user", "gpt": "assistant"}
"""The role for each value of `role` or of ShareGPT's `from`. LLaMA-Factory has calls and their results as roles,
OpenAI once had `function`."""
FORMS: tuple[Mapping[str, tuple[str, ...]], ...] = (
    {"messages": ("messages",)},
    {"messages": ("conversations",)},
    {"prompt": ("prompt",), "completion": ("completion",)},
    {
        "prompt": ("instruction",),
        "input": ("input", "context"),
        "completion": ("output", "response"),
        "history": ("history",),
    },
)
"""The columns of each part of a record: OpenAI's, ShareGPT's, a prompt with its completion, Alpaca's and Dolly's."""
IN_ANY_FORM: Mapping[str, tuple[str, ...]] = {"system": ("system", "system_prompt"), "tools": ("tools", "functions")}
ANSWERS = ("completion", "response", "output")
TEXT_PARTS = ("text", "input_text", "output_text")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message with what was thought before it."""
IN_LOSS = ("weight", "train", "loss")
"""Keys of a message that say whether it counts: 0 or false leaves it out."""
RULES = 5
"""Version of what records become. Raise it with every change: no preparation then goes on under other rules."""
CALL, OTHER_CALL = {"place": "here"}, {"place": "there"}
TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
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
    content: str | list[dict[str, str]] | None


class Conversations:
    """Records that are conversations. A document is one as JSON: its messages, the numbers of those that count, and
    the tools that it may call. `columns`: where records of no common form have each part."""

    is_text = False
    description = "a conversation"

    def __init__(self, columns: Mapping[str, str] | None = None) -> None:
        named = {part: (name,) for part, name in (columns or {}).items()}
        self._forms = [{**IN_ANY_FORM, **form} for form in ([named] if named else FORMS)]
        first = [form.get("messages") or form["prompt"] for form in self._forms]
        self.columns = tuple(name for names in first for name in names)
        rest = {name: None for form in self._forms for names in form.values() for name in names}
        self.optional_columns = tuple(name for name in rest if name not in self.columns)
        self._is_named = bool(named)
        self.missing_columns = {*(columns or {}).values()}
        """Columns named by the user that no record so far has."""

    def document(self, record: Any) -> bytes:
        """Raises KeyError for a record without a conversation, ValueError for one that cannot be trained on."""
        if not isinstance(record, Mapping):
            raise ValueError(f"it is a {type(record).__name__}")
        self.missing_columns.difference_update(record)
        form = self._form(record)
        column = {part: _column(record, names) for part, names in form.items()}
        value = {part: record.get(name) for part, name in column.items()}
        answer = next((name for name in ANSWERS if record.get(name)), "COLUMN")
        if "prompt" in form and value["completion"] is None:
            names = " or ".join(map(repr, form["completion"]))
            raise ValueError(f"it has no {names}: --columns prompt={column['prompt']},completion={answer} names others")
        before = _before(value, column) if "prompt" in form else []
        last = "completion" if "prompt" in form else "messages"
        rest = _messages(value[last], column[last], "assistant" if "prompt" in form else "")
        if not rest:
            raise ValueError("it has no messages")
        if last == "messages" and not self._is_named:
            _refuse_another_answer(record, column[last], rest, answer)
        if all(message["role"] != "assistant" for message, _ in rest):
            raise ValueError("it has no assistant turn, so that nothing counts in the loss")
        messages = [message for message, _ in before + rest]
        system = value["system"]
        if not isinstance(system, str | None):
            raise ValueError(f"its system is a {type(system).__name__} and no text")
        if system and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": system})
            before.insert(0, (messages[0], False))
        elif system and messages[0]["content"] != system:
            raise ValueError("its system and the system message in its list differ: keep one of them")
        flags = [counts and message["role"] == "assistant" for message, counts in before + rest]
        if not any(flags):
            raise ValueError("nothing counts in the loss: its assistant turns are all marked so; leave the record out")
        turns = [number for number, counts in enumerate(flags) if counts]
        return json.dumps(
            {"messages": messages, "turns": turns, "tools": _tools(value["tools"])}, ensure_ascii=False
        ).encode()

    def _form(self, record: Mapping[str, object]) -> Mapping[str, tuple[str, ...]]:
        """The first form of which the record has all that is needed, else the first of which it has something."""
        for needed in (("messages", "prompt", "completion"), ("messages", "prompt")):
            for form in self._forms:
                if all(any(record.get(name) is not None for name in form[part]) for part in needed if part in form):
                    return form
        raise KeyError(self.columns[0])


def _refuse_another_answer(
    record: Mapping[str, object], column: str, messages: list[tuple[Message, bool]], answer: str
) -> None:
    """Raises ValueError for a record that has other messages or the last answer in another column."""
    more = record.get("conversations")
    if column == "messages" and more and _messages(more, "conversations") != messages:
        raise ValueError("its 'messages' and 'conversations' differ: --columns messages=COLUMN names the one to take")
    if answer in ANSWERS and messages[-1][0]["role"] != "assistant":
        raise ValueError(
            f"its {column!r} end without the answer that {answer!r} has: give --columns prompt={column},completion="
            f"{answer}"
        )


def _column(record: Mapping[str, object], names: Sequence[str]) -> str:
    """The column of these that a record has, of which one may be filled."""
    filled = [name for name in names if record.get(name)]
    if len(filled) > 1:
        raise ValueError(f"it has {' and '.join(map(repr, filled))}: --columns names the one to take")
    return next(iter(filled or (name for name in names if record.get(name) is not None)), names[0])


def _tools(value: Any) -> list[Any] | None:
    """Tools as OpenAI has them, of a list or its JSON; names and parameters alone are a function's."""
    tools = _parsed(value, "its tools") if isinstance(value, str) and value.strip() else _without_nulls(value) or None
    if not isinstance(tools, list | None):
        raise ValueError(f"its tools are a {type(tools).__name__} and no list")
    return [
        {"type": "function", "function": {key: part for key, part in tool.items() if key != "type"}}
        if isinstance(tool, Mapping) and "name" in tool and "function" not in tool
        else tool
        for tool in tools or ()
    ] or None


def _parsed(text: str, name: str) -> Any:
    try:
        return plain_json(text)
    except ValueError as error:
        raise ValueError(f"{name} are no JSON: {error}") from error


def _before(value: Any, column: Mapping[str, str]) -> list[tuple[Message, bool]]:
    """The messages before a completion: none counts but the answers of Alpaca's history. `column`: of each part."""
    prompt, more, history = value["prompt"], value.get("input"), value.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise ValueError("its history is no list of pairs of a question and its answer")
    sides = [each for ask, answer in history for each in ((ask, "user"), (answer, "assistant"))]
    turns = [each for text, role in sides for each in _messages(text, column["history"], role)]
    if more:
        if not (isinstance(prompt, str) and isinstance(more, str)):
            raise ValueError("its prompt and its input are not both text")
        prompt = f"{prompt}\n{more}"
    return turns + [(message, False) for message, _ in _messages(prompt, column["prompt"], "user")]


def _messages(value: Any, column: str, role: str = "") -> list[tuple[Message, bool]]:
    """The messages of a list, and whether each may count in the loss; text is one message of `role`."""
    if role and isinstance(value, str):
        return [({"role": role, "content": value}, True)]
    if not isinstance(value, list):
        raise ValueError(
            f"its {column!r} is a {type(value).__name__} and no list of messages: write one, or --columns names "
            "another column"
        )
    return [_message(number, turn) for number, turn in enumerate(value, 1)]


def _message(number: int, turn: Any) -> tuple[Message, bool]:
    if not isinstance(turn, Mapping):
        raise ValueError(f"message {number} is a {type(turn).__name__}")
    turn = _without_nulls(turn)
    keys, roles = (("from", "value"), SHAREGPT) if "from" in turn else (("role", "content"), ROLES)
    role, content = (turn.pop(key, None) for key in keys)
    if not isinstance(role, str) or role not in roles:
        raise ValueError(f"message {number} has the role {role!r}: known are {', '.join(roles)}")
    content = _text(number, content)
    if role == CALLS and isinstance(content, str):
        thought, mark, text = content.rpartition("</think>")
        calls = _parsed(text, f"message {number}'s calls")
        content, turn["tool_calls"] = thought + mark, _calls(number, calls if isinstance(calls, list) else [calls])
    elif CALLS in turn:  # as OpenAI once had them
        turn["tool_calls"] = _calls(number, [turn.pop(CALLS)])
    elif isinstance(turn.get("tool_calls"), str):
        turn["tool_calls"] = _parsed(turn["tool_calls"], f"message {number}'s tool_calls")
    if not isinstance(content, str | list) and not (content is None and turn.get("tool_calls")):
        calls = " and no calls" * ("tool_calls" in turn)
        raise ValueError(f"message {number} has {type(content).__name__} and no text in it{calls}")
    flags = {key: turn.pop(key) for key in IN_LOSS if key in turn}  # which no template sees
    for key, flag in flags.items():
        if flag not in (0, 1):  # False and True are
            raise ValueError(f"message {number} has {key}={flag!r}: 0 or false leaves it out of the loss, 1 counts it")
    return {**turn, "role": roles[role], "content": content}, all(flags.values())


def _text(number: int, content: Any) -> Any:
    """The content of a message, where it is a list of one text that text. Raises ValueError for other parts."""
    if not isinstance(content, list):
        return content
    texts: list[dict[str, str]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ValueError(f"message {number} has a part of type {kind!r}: only parts of text are trained on")
        texts.append({"type": "text", "text": part["text"]})
    return texts if len(texts) > 1 else texts[0]["text"] if texts else None


def _calls(number: int, calls: list[Any]) -> list[Any]:
    if not calls or not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise ValueError(f"message {number} has a {CALLS} without a name: give name and arguments")
    return [{"type": "function", "function": call} for call in calls]


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


def _thoughts(message: Message) -> str:
    """What a turn thinks before its answer, by a key of its own or before `</think>`."""
    content = message["content"]
    before = content.rpartition("</think>")[0].rpartition("<think>")[2] if isinstance(content, str) else ""
    return str(next((message[key] for key in THOUGHTS if message.get(key)), before)).strip()  # type: ignore[literal-required]


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
        self._takes_parts, self._needs_parts = self._kind_of_content()
        identity = [RULES, plain.sha256, template, self._tokenizer.special_tokens_map]
        self.sha256 = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def encode(self, conversations: Sequence[bytes]) -> list[tuple[Tokens, Counted]]:
        """The tokens of the documents of each without their end, and which of them and of that end count. The end
        counts where the template has written it itself. Raises ValueError for a conversation without counted tokens,
        and what the template raises."""
        return [document for each in conversations for document in self._encode(**plain_json(each))]

    def _encode(
        self, messages: list[Message], turns: list[int], tools: list[Any] | None
    ) -> list[tuple[Tokens, Counted]]:
        messages = [self._with_content(_with_arguments(message, self._arguments)) for message in messages]
        if not self._writes_calls and any(message.get("tool_calls") for message in messages):
            raise ValueError("its chat template writes no tool_calls: give one that does, or leave such ones out")
        if tools and not self._writes_tools:
            raise ValueError("its chat template writes no tools: give one that does, or leave the tools out")
        documents, num_tokens = [], 0
        for stop, part in self._parts(messages, turns, tools):
            documents.append(self._document(messages[:stop], part, tools))
            num_tokens += len(documents[-1][0])
            if num_tokens > MAX_RECORD_BYTES // 4:
                raise ValueError(f"its turns, each with what comes before it, are over {num_tokens:,} tokens")
        return documents

    def _parts(self, messages: list[Message], turns: list[int], tools: list[Any] | None) -> list[tuple[int, list[int]]]:
        """(number of messages, turns that count) of each document: a turn begins a new one where the template writes
        what comes before it otherwise than when that was generated. Raises ValueError for thoughts that it drops."""
        parts: list[list[int]] = []
        before, whole = "", self._rendered(messages, tools)[0]
        for turn in turns:
            text = whole if turn + 1 == len(messages) else self._rendered(messages[: turn + 1], tools)[0]
            if (thoughts := _thoughts(messages[turn])) not in text:
                raise ValueError(
                    f"its chat template drops what message {turn + 1} thinks ({cut(thoughts, 40)!r}): give one that "
                    "writes it, or leave the thoughts out"
                )
            if not parts or not text.startswith(before):
                parts.append([])
            parts[-1].append(turn)
            before = text
        stops = [part[-1] + 1 for part in parts[:-1]]
        stops.append(len(messages) if whole.startswith(before) else parts[-1][-1] + 1)
        return list(zip(stops, parts, strict=True))

    def _document(self, messages: list[Message], turns: list[int], tools: list[Any] | None) -> tuple[Tokens, Counted]:
        masks: list[Any] = []
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
        text = self._with_call(CALL)
        self._writes_calls = text is None or text != self._with_call(OTHER_CALL)
        if str(CALL) not in (text or str(CALL)):
            return dict
        return str if self._with_call(json.dumps(CALL)) is not None else None

    def _kind_of_content(self) -> tuple[bool, bool]:
        """Whether the template writes all of a list of texts, as it writes text, and whether it writes lists alone."""
        first, second = "Look at one.", "Look at two."
        parts = [{"type": "text", "text": text} for text in (first, second)]
        text, listed, both = (
            self._tried({"role": "assistant", "content": each}, each) or "" for each in (first, parts[:1], parts)
        )
        needs = first not in text and first in listed
        return min(both.count(first), both.count(second)) > 1 and (needs or text == listed), needs

    def _with_content(self, message: Message) -> Message:
        """The message with its content as the template takes it. Servers, too, put a line between texts of a list."""
        content = message["content"]
        is_taken = self._takes_parts and (self._needs_parts or message["role"] in ("user", "assistant"))
        if isinstance(content, list) and not is_taken:
            content = "\n".join(part["text"] for part in content)
        if isinstance(content, str) and self._needs_parts:
            content = [{"type": "text", "text": content}]
        return {**message, "content": content}

    @cached_property
    def _writes_tools(self) -> bool:
        other = {**TOOL, "function": {**cast(Any, TOOL["function"]), "name": "seek"}}
        text, changed = (self._tried({"role": "assistant", "content": "Yes."}, tools=[each]) for each in (TOOL, other))
        return text is None or text != changed

    def _with_call(self, arguments: object) -> str | None:
        """What the template writes of a call with these arguments; None where it refuses it."""
        call = {"id": "000000000", "type": "function", "function": {"name": "look", "arguments": arguments}}
        return self._tried({"role": "assistant", "content": "", "tool_calls": [call]})

    def _tried(self, answer: object, question: object = "Look.", tools: list[Any] | None = None) -> str | None:
        """What the template writes of an answer; None where it refuses it."""
        turns = [{"role": "user", "content": question}, answer]
        try:
            return self._rendered(cast(list[Message], turns), tools)[0]
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
            is_whole = turn + 1 == len(messages)
            texts.append(texts[0] if is_whole else self._rendered(messages[: turn + 1], tools)[0])
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
