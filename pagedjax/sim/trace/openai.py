"""What the OpenAI API says: messages and tools of a request, text and tokens of a response, streamed or whole."""

from __future__ import annotations

import json
from typing import Any

from pagedjax.sim.records import Fields, parse

_RESPONSES = ("instructions", "max_output_tokens", "reasoning", "text", "truncation")  # of that API alone
_OF_A_RESPONSE = ("choices", "usage", "output", "error", "body", "object")


def as_json(value: Any) -> str:
    """Canonical JSON: equal values, equal text."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def text_of(message: dict[str, Any], separator: str = "\n") -> str:
    """Content and tool calls of a message, as the templates write them."""
    calls = f"{separator}{as_json(message['tool_calls'])}" if message.get("tool_calls") else ""
    return f"{message['content']}{calls}"


def object_of(row: Fields, name: str, value: Any) -> dict[str, Any]:
    """An object, or its JSON text (JSON text of JSON text, too: some gateways quote twice)."""
    for _ in range(2):
        if isinstance(value, str):
            value = parse(row.path, row.line, value, f"{name} must be a JSON object")
    if not isinstance(value, dict):
        row.fail(f"{name}={type(value).__name__}", "must be an object, or its JSON text")
    return value


def message_of(row: Fields, message: Any) -> dict[str, Any]:
    """A message with its content as one text.

    Raises:
        TraceError: It has no role, or holds what has no tokens here.
    """
    entry = Fields(row.path, row.line, message).record
    if not isinstance(entry.get("role"), str):
        row.fail("a message without a role", "must have the string `role`")
    content = entry.get("content")
    if isinstance(content, list):
        content = "".join(_part(row, part) for part in content)
    if content is None:
        content = ""  # a tool call alone
    if not isinstance(content, str):
        row.fail(f"content={type(content).__name__}", "must be text or a list of text parts")
    return {**entry, "content": content}


def _part(row: Fields, part: Any) -> str:
    if isinstance(part, str):
        return part
    entry = Fields(row.path, row.line, part).record
    text = entry.get("text", entry.get("refusal"))
    if not isinstance(text, str):
        row.fail(
            f"a content part of type {entry.get('type')!r:.30}",
            "must be text: what stands for a picture or a sound has no tokens here; take such rows out",
        )
    return text


def tools_of(row: Fields, tools: Any) -> list[Any]:
    """Tool descriptions: a list, or its JSON text (as ShareGPT files keep it); [] where there are none."""
    if tools in (None, "", []):
        return []
    if isinstance(tools, str):
        tools = parse(row.path, row.line, tools, "tools must be a JSON list")
    if not isinstance(tools, list):
        row.fail(f"tools={type(tools).__name__}", "must be a list")
    return tools


def messages_of(row: Fields, body: dict[str, Any], name: str | None) -> list[dict[str, Any]]:
    """Messages of a request: of a chat, or `input` and `instructions` of the Responses API.

    Raises:
        TraceError: There are none; what stands there instead is named.
    """
    messages = body.get(name) if name else None
    if isinstance(messages, str):  # a cell of a table
        messages = parse(row.path, row.line, messages, f"{name} must be a JSON list of messages")
    if messages is None and "input" in body:
        return _responses_input(row, body)
    if not isinstance(messages, list) or not messages:
        got = "an empty list of messages" if messages == [] else f"messages={type(messages).__name__}"
        row.fail(got, "must be a non-empty list; the output file of a batch holds no prompts")
    return [message_of(row, message) for message in messages]


def _responses_input(row: Fields, body: dict[str, Any]) -> list[dict[str, Any]]:
    given = body["input"]
    items = given if isinstance(given, list) else []
    listed = bool(items) and all(isinstance(item, dict) for item in items)
    if not listed and not (isinstance(given, str) and any(name in body for name in _RESPONSES)):
        row.fail(
            "an `input` without messages",
            "must be of the Responses API: an embedding has no answer to decode; take such rows out",
        )
    if body.get("previous_response_id"):
        row.fail(
            "previous_response_id", "must be absent: the turns before stand elsewhere; take such rows out"
        )
    said = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    if isinstance(given, str):
        return [message_of(row, m) for m in [*said, {"role": "user", "content": given}]]
    for item in items:
        if item.get("type") in ("function_call", "reasoning"):
            said.append({"role": "assistant", "content": "", "tool_calls": [item]})
        elif item.get("type") == "function_call_output":
            said.append({"role": "tool", "content": item.get("output")})
        else:
            said.append(item)
    return [message_of(row, message) for message in said]


def prompt_of(row: Fields, prompt: Any) -> str | list[int] | None:
    """The prompt of a completion: text, token ids, or a list with one of them; None where it is something else.

    Raises:
        TraceError: It is a list of several prompts.
    """
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            row.fail(
                f"{len(prompt)} prompts in one request",
                "must be one; write one request a row, without the others",
            )
        prompt = prompt[0]
    return prompt if isinstance(prompt, str | list) else None


def reply_of(row: Fields, name: str, value: Any, *, strict: bool = False) -> tuple[str, int | None]:
    """What was answered, and how many tokens that is where the response counts them.

    Args:
        row: For messages.
        name: Of the column.
        value: A response as an object or JSON text, streamed (`data: …` lines, or a list of chunks), or plain text,
            such as JSON that a model was asked for.
        strict: Text that begins as an object and is none is a response that was cut.
    """
    if value is None:
        return "", None
    if isinstance(value, str):
        start = value.lstrip()
        if start.startswith(("data: {", "data:{", "event:")):
            return _streamed(row, _events(row, name, value))
        known = _is_response(value) if start.startswith("{") else False
        if known is False or (known is None and not strict):
            return value, None
    if isinstance(value, list):
        return _streamed(row, [Fields(row.path, row.line, chunk).record for chunk in value])
    response = object_of(row, name, value)
    response = response.get("body", response)  # batch files nest once more
    if not isinstance(response, dict):
        return "", None
    return _said(response), _usage(row, response)


def _is_response(text: str) -> bool | None:
    """None: it is no JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return isinstance(value, dict) and not value.keys().isdisjoint(_OF_A_RESPONSE)


def _events(row: Fields, name: str, text: str) -> list[dict[str, Any]]:
    """Server-sent events: the objects of the `data:` lines."""
    data = (line.strip()[5:].strip() for line in text.splitlines() if line.strip().startswith("data:"))
    return [object_of(row, name, one) for one in data if one and one != "[DONE]"]


def _streamed(row: Fields, chunks: list[dict[str, Any]]) -> tuple[str, int | None]:
    """Pieces of the first choice put together; the whole response wins where the last event holds it."""
    text, calls, usage = "", "", None
    for chunk in chunks:
        if isinstance(chunk.get("response"), dict) and chunk["response"].get("output"):
            return _said(chunk["response"]), _usage(row, chunk["response"])
        if isinstance(chunk.get("delta"), str):
            text += chunk["delta"]
        for choice in chunk.get("choices") or []:
            if not isinstance(choice, dict) or choice.get("index", 0) != 0:
                continue
            given = choice.get("delta")
            delta: dict[str, Any] = given if isinstance(given, dict) else {}
            text += _str(delta.get("content")) + _str(choice.get("text"))
            for call in delta.get("tool_calls") or []:
                function = call.get("function") if isinstance(call, dict) else None
                if isinstance(function, dict):
                    calls += _str(function.get("name")) + _str(function.get("arguments"))
        counted = _usage(row, chunk)
        usage = usage if counted is None else counted
    return f"{text}\n{calls}" if calls else text, usage


def _str(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _said(response: dict[str, Any]) -> str:
    """What a response says first, its tool calls included; "" where it says nothing."""
    if isinstance(response.get("output"), list):  # Responses API
        parts = []
        for item in response["output"]:
            if isinstance(item, dict) and item.get("type") == "function_call":
                parts.append(as_json(item))
            elif isinstance(item, dict):
                parts += [_str(p.get("text")) for p in item.get("content") or [] if isinstance(p, dict)]
        return "\n".join(part for part in parts if part)
    choices = response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = first.get("message")
    if not isinstance(message, dict):
        return _str(first.get("text"))
    return text_of({**message, "content": _str(message.get("content"))}).removeprefix("\n")


def _usage(row: Fields, response: dict[str, Any]) -> int | None:
    """Tokens of the answer as the response counts them; of several choices nobody says which has how many."""
    usage, choices = response.get("usage"), response.get("choices")
    if not isinstance(usage, dict) or (isinstance(choices, list) and len(choices) > 1):
        return None
    for name in ("completion_tokens", "output_tokens"):
        if usage.get(name) is not None:
            return Fields(row.path, row.line, usage).length(name)
    return None
