"""Traces of text: prompts, chat logs and batch files, gateway logs, ShareGPT, Alpaca instructions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pagedjax.sim.records import Fields
from pagedjax.sim.trace.openai import as_json, messages_of, object_of, prompt_of, reply_of, text_of, tools_of
from pagedjax.sim.trace.reading import Source, Times, wishes_of
from pagedjax.sim.trace.request import Trace, TraceRequest

TIMES = (
    "arrival_s",
    "timestamp",
    "created",
    "created_at",
    "time",
    "ts",
    "start_time",
    "TIMESTAMP",
    "Timestamp",
)
TIME_UNITS = {"arrival_s": "s"}
_COMMON = {
    "time": TIMES,
    "input": (),
    "output": ("num_output", "output_tokens", "completion_tokens", "output_length"),
    "answer": ("response", "output", "completion", "answer"),
    "session": ("session", "session_id", "conversation_id"),
    "group": ("category", "user", "group"),
}

PROMPT_COLUMNS = {**_COMMON, "prompt": ("prompt", "text", "text_input")}
CHAT_COLUMNS = {**_COMMON, "messages": ("messages",), "tools": ("tools",)}
GATEWAY_COLUMNS = {
    **_COMMON,
    "body": ("body", "request_body", "requestBody", "request"),
    "answer": ("response_body", "responseBody", "response"),
}
SHAREGPT_COLUMNS = {"turns": ("conversations", "conversation"), "session": ("id",), "tools": ("tools",)}
ALPACA_COLUMNS = {
    "prompt": ("instruction",),
    "more": ("input",),
    "answer": ("output",),
    "group": ("dataset",),
}
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}


def chatml(messages: list[dict[str, Any]], tools: list[Any]) -> str:
    """Messages as ChatML, tools as JSON lines in front; ends where the answer begins."""
    parts = [f"<|im_start|>tools\n{as_json(tools)}<|im_end|>\n"] if tools else []
    parts += [f"<|im_start|>{message['role']}\n{text_of(message)}<|im_end|>\n" for message in messages]
    return "".join(parts) + "<|im_start|>assistant\n"


def plain(messages: list[dict[str, Any]], tools: list[Any]) -> str:
    """Messages as lines `role: content`, tools in front; ends where the answer begins."""
    parts = [f"tools: {as_json(tools)}\n"] if tools else []
    parts += [f"{message['role']}: {text_of(message, ' ')}\n" for message in messages]
    return "".join(parts) + "assistant: "


TEMPLATES = {"chatml": chatml, "plain": plain}


class _Texts:
    """Turns rows of text into requests: one tokenizer, one template, one clock."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._times = Times(source) if "time" in source.columns else None
        self._encode = source.encode
        self._chat = source.reading.chat or chatml

    def ids(self, row: Fields, text: str) -> np.ndarray:
        """i32[n] of a text."""
        try:
            return np.array(self._encode(text), dtype=np.int32)
        except UnicodeEncodeError:
            row.fail("a lone surrogate", "must be text that UTF-8 can hold")

    def prompt(self, row: Fields, messages: list[dict[str, Any]], tools: list[Any]) -> str:
        """Messages through the template."""
        try:
            return self._chat(messages, tools)
        except ValueError as error:
            row.fail("messages that the chat template refuses", str(error))

    def request(
        self,
        row: Fields,
        prompt: str | list[int],
        answer: str,
        session: str,
        stated: int | None = None,
        group: str = "",
    ) -> TraceRequest:
        """One request; `stated` tokens of the answer win over its text's.

        `group` wins over the row's own, but not over a column that was named for it.
        """
        if isinstance(prompt, str):
            ids = self.ids(row, prompt)
            if not len(ids):
                row.fail(f"prompt={prompt!r:.40} without a token", "must hold at least one token")
        else:
            ids = Fields(row.path, row.line, {"prompt": prompt}).ids("prompt", np.int32)
            if not len(ids):
                row.fail("an empty prompt", "must hold at least one token")
        source = self.source
        if not group or "group" in source.reading.columns:
            group = source.text("group", row.record) if "group" in source.columns else ""
        output = self.ids(row, answer) if answer else None
        unknown = source.reading.output_tokens if output is None else len(output)
        if stated is None:
            stated = row.length(*source.columns.get("output", ()), default=unknown)
        if output is not None and len(output) != stated:
            output = None  # cut, or counted by another tokenizer: its ids would not be what was generated
        return TraceRequest(
            arrival_s=(self._times.of(row) if self._times else None) or 0.0,
            num_input=len(ids),
            num_output=stated,
            token_ids=ids,
            output_ids=output,
            session=session,
            wishes=wishes_of(row),
            group=group,
        )


def _trace(source: Source, name: str, requests: Any) -> Trace:
    def source_of() -> Iterator[TraceRequest]:
        texts = _Texts(source)
        for line, record in source.rows():
            yield from requests(texts, Fields(source.path, line, record))

    source.encode  # noqa: B018  refuses at once where there is no tokenizer
    timed = "time" in source.columns and source.column("time") is not None
    return Trace(source.path.name.split(".")[0], name, 1, True, source_of, source.path, timed=timed)


def open_prompts(source: Source) -> Trace:
    """Plain prompts: a column of any table, `prompt` or `text` of JSON lines, lines of a .txt file."""

    def requests(texts: _Texts, row: Fields) -> Iterator[TraceRequest]:
        name = source.column("prompt", row.record)
        prompt = row.record[name] if name else None
        if not isinstance(prompt, str):
            wanted = " or ".join(f"`{n}`" for n in source.columns["prompt"])
            row.fail(f"fields {sorted(row.record)!r:.300}", f"must hold a non-empty string {wanted}")
        answer, stated = _answer(source, row)
        yield texts.request(row, prompt, answer, source.text("session", row.record), stated)

    return _trace(source, "prompts", requests)


def open_alpaca(source: Source) -> Trace:
    """Alpaca instructions: instruction and input are the prompt, output the answer."""

    def requests(texts: _Texts, row: Fields) -> Iterator[TraceRequest]:
        more = source.text("more", row.record)
        prompt = source.text("prompt", row.record)
        yield texts.request(
            row, f"{prompt}\n{more}" if more else prompt, source.text("answer", row.record), ""
        )

    return _trace(source, "alpaca-text", requests)


def open_sharegpt(source: Source) -> Trace:
    """ShareGPT conversations: each answer of the assistant is a request with all that was said before it."""

    def requests(texts: _Texts, row: Fields) -> Iterator[TraceRequest]:
        name = source.column("turns", row.record)
        turns = row.record.get(name) if name else None
        if not isinstance(turns, list):
            row.fail(f"{source.columns['turns'][0]}={type(turns).__name__}", "must be a list of turns")
        tools = tools_of(row, row.record.get("tools"))
        session = source.text("session", row.record) or f"{row.line}"
        said: list[dict[str, Any]] = []
        for turn in turns:
            entry = Fields(row.path, row.line, turn).record
            who, text = entry.get("from", entry.get("role")), entry.get("value", entry.get("content"))
            if who not in _ROLES or not isinstance(text, str):
                row.fail(
                    f"a turn from {who!r:.30} with {type(text).__name__}",
                    f"must be text from one of {', '.join(_ROLES)}",
                )
            if _ROLES[who] == "assistant" and said:
                yield texts.request(row, texts.prompt(row, said, tools), text, session)
            said = [*said, {"role": _ROLES[who], "content": text}]

    return _trace(source, "sharegpt", requests)


def open_chat(source: Source) -> Trace:
    """Chat logs, `messages` a row; a last message of the assistant is the answer, where no column holds one."""

    def requests(texts: _Texts, row: Fields) -> Iterator[TraceRequest]:
        answer, stated = _answer(source, row)
        said = messages_of(row, row.record, source.column("messages", row.record))
        if said[-1]["role"] == "assistant" and len(said) > 1 and not answer:
            answer = text_of(said.pop()).removeprefix("\n")
        yield _chat_request(source, texts, row, row.record, said, answer, stated)  # its user is a column

    return _trace(source, "chat", requests)


def open_gateway(source: Source) -> Trace:
    """Requests of the OpenAI API as a gateway or a batch file keeps them: a body, as an object or as JSON text.

    What the body holds was asked, a last message of the assistant too; what was answered stands in the response.
    """

    def requests(texts: _Texts, row: Fields) -> Iterator[TraceRequest]:
        name = source.column("body", row.record)
        if name is None:
            row.fail(f"no {source.columns['body'][0]}", "must hold a request's body")
        body = object_of(row, name, row.record[name])
        answer, stated = _answer(source, row, strict=True)
        user = body["user"] if isinstance(body.get("user"), str) else ""
        prompt = prompt_of(row, body.get("prompt")) if body.get("messages") is None else None
        if prompt is not None:
            yield texts.request(row, prompt, answer, source.text("session", row.record), stated, user)
            return
        yield _chat_request(
            source, texts, row, body, messages_of(row, body, "messages"), answer, stated, user
        )

    return _trace(source, "gateway", requests)


def _chat_request(
    source: Source,
    texts: _Texts,
    row: Fields,
    body: dict[str, Any],
    said: list[dict[str, Any]],
    answer: str,
    stated: int | None,
    user: str = "",
) -> TraceRequest:
    session = source.text("session", row.record)
    prompt = texts.prompt(row, said, tools_of(row, body.get("tools")))
    return texts.request(row, prompt, answer, session, stated, user)


def _answer(source: Source, row: Fields, *, strict: bool = False) -> tuple[str, int | None]:
    """The answer beside a prompt, and its stated tokens: text, or an OpenAI response; "" where there is none."""
    name = source.column("answer", row.record)
    return ("", None) if name is None else reply_of(row, name, row.record[name], strict=strict)
