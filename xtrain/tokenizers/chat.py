"""Chat templates: messages -> text, and which part of it the assistant says (needs the package `jinja2`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from ..errors import DataError, shown

# What stands around a `generation` block until the text is rendered; private characters, which no message may hold.
_OPEN, _CLOSE = "\uf8f0", "\uf8f1"
Span = tuple[int, int]  # of characters: from the first, to the one behind the last
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """The template of a model's conversations, in Jinja, as transformers renders it.

    files: those of a tokenizer {name: content}: chat_template.jinja, or the chat_template of tokenizer_config.json, and
    there the special tokens. DataError when there is none, when it cannot be read, and without jinja2.
    """

    def __init__(self, files: Mapping[str, bytes], name: object = "the tokenizer") -> None:
        self.name = str(name)
        settings = _settings(files)
        text = _text(files, settings)
        if text is None:
            raise DataError(
                f"data: {self.name} must have a chat template for messages, and has none in chat_template.jinja or "
                "tokenizer_config.json"
            )
        self._tokens = {key: _content(settings[key]) for key in _NAMED if settings.get(key) is not None}
        self._template = self._compile(text)
        self._marks = re.search(r"{%-?\s*generation\s*-?%}", text) is not None

    def _compile(self, text: str) -> Any:
        try:
            import jinja2.sandbox
        except ImportError:
            raise DataError("data: messages need the package jinja2: pip install 'xtrain[chat]'") from None

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation(), "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(text)
        except Exception as error:  # of Jinja, and of Python: nested too deeply, a number of thousands of digits
            raise DataError(f"data: the chat template of {self.name} cannot be read: {shown(error, 200)}") from None

    def _render(self, messages: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> str:
        try:
            return self._template.render(messages=list(messages), **self._tokens, **more)
        except Exception as error:  # a template is a program
            raise DataError(f"the chat template refuses them: {shown(error, 200)}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> str:
        """The text of a conversation. messages: {"role", "content", ...} each. add_generation_prompt: with what comes
        before an answer. DataError for messages that the template refuses.
        """
        more = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        return self._render(messages, more).replace(_OPEN, "").replace(_CLOSE, "")

    def spans(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[Span]]:
        """The text of a conversation, and where the assistant speaks in it: in the `generation` blocks of the template;
        where it has none, behind what `add_generation_prompt` writes before each message of the role assistant.

        DataError for messages that the template refuses, and where the text of the messages up to an answer is not
        how the whole begins.
        """
        try:
            spelled = json.dumps(list(messages), ensure_ascii=False, default=str)
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"its messages must be what JSON can spell: {shown(error, 200)}") from None
        if _OPEN in spelled or _CLOSE in spelled:
            raise DataError("its messages must not hold the characters U+F8F0 and U+F8F1")
        if self._marks:
            more = {"tools": None, "documents": None, "add_generation_prompt": False}
            return _split(self._render(messages, more))
        whole = self.render(messages)
        found: list[Span] = []
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self.render(messages[:index], add_generation_prompt=True)
            until = self.render(messages[: index + 1])
            if not until.startswith(before):
                raise DataError(
                    f"the chat template writes message {index + 1} otherwise than add_generation_prompt announces it; "
                    "mark what is learned with a generation block"
                )
            if not whole.startswith(until):
                raise DataError(
                    f"the chat template changes message {index + 1} when others follow; "
                    "mark what is learned with a generation block"
                )
            found.append((len(before), len(until)))
        return whole, found


def has_template(files: Mapping[str, bytes]) -> bool:
    """Whether the files of a tokenizer hold a chat template, which may be one that cannot be read."""
    return _text(files, _settings(files)) is not None


def _settings(files: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        settings = json.loads(files.get("tokenizer_config.json", b"{}"))
    except (ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _text(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> str | None:
    """The template, unread; None where there is none."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode("utf-8", "replace")
    text = _default(settings.get("chat_template"))
    return text if isinstance(text, str) else None


def _split(text: str) -> tuple[str, list[Span]]:
    """The text without marks, and where they were."""
    first, *others = text.split(_OPEN)
    whole, found = first, []
    for part in others:
        inside, _, after = part.partition(_CLOSE)
        found.append((len(whole), len(whole) + len(inside)))
        whole += inside + after
    return whole, found


def _default(stored: Any) -> Any:
    """The template of tokenizer_config.json: a text, or of several the one named default."""
    if isinstance(stored, list):
        return next((item.get("template") for item in stored if _is_default(item)), None)
    return stored


def _is_default(item: Any) -> bool:
    return isinstance(item, dict) and item.get("name") == "default"


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _raise(message: str) -> None:
    raise ValueError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:  # fmt: skip  # noqa: E501
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _generation() -> Any:
    """The extension that knows `{% generation %} ... {% endgeneration %}`, and marks what is inside."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_mark")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    return Generation
