"""Tensors, modules and runs as HTML: small, with every text escaped, and nothing that is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from .. import _C

_LONGEST = 20_000  # letters of a text that is shown whole
_MOST = 100  # members that a module shows, at all depths together
_MOST_PARAMETERS = 400  # the same of parameters
_PRE = '<pre style="margin:4px 0;max-height:24em;overflow:auto">'


def shown(text: str) -> str:
    """A text as it is typed, escaped; of a long one the beginning and the end."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]}\n...\n{text[-_LONGEST // 2 :]}"
    return f"{_PRE}{escape(text)}</pre>"


def table(rows: Iterable[tuple[str, object]]) -> str:
    """Names beside values, escaped."""
    text = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(str(value))}</td></tr>'
        for name, value in rows
    )
    return f"<table>{text}</table>"


def tensor(value: _C.Tensor) -> str:
    """Shape, dtype, device and bytes, then the repr."""
    kind = escape(type(value).__name__)
    grad = ", requires gradient" if value.requires_grad else ""
    size = f"{value.nbytes:,} bytes"
    about = f"{list(value.shape)} {value.dtype.name}, {value.device}, {size}{grad}"
    return f"<div><b>{kind}</b> {escape(about)}{shown(repr(value))}</div>"


def module(value: Any) -> str:
    """A module: its parameters counted, then a line for each member and parameter; members open on a click."""
    parameters = list(value.parameters())
    count = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    parts = [f"{count:,} parameters"]
    if trained != count:
        parts.append(f"{trained:,} of them trained")
    parts += sorted({p.dtype.name for p in parameters}) + sorted({str(p.device) for p in parameters})
    size = sum(p.nbytes for p in parameters)
    parts.append(f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size:,} bytes")
    left = [_MOST, _MOST_PARAMETERS]
    return f"<div><b>{escape(type(value).__name__)}</b> {escape(', '.join(parts))}{_members(value, left)}</div>"


def _members(value: Any, left: list[int]) -> str:
    """The parameters and members of a module as a list; equal neighbours that are numbered take one line. left: how
    many more members and parameters there may be, at all depths together.
    """
    lines: list[str] = []
    for name, p in value.named_parameters(recurse=False):
        if left[1] <= 0:
            lines.append("...")
            break
        left[1] -= 1
        frozen = "" if p.requires_grad else ", frozen"
        lines.append(f"<code>{escape(name)}</code> {list(p.shape)} {escape(p.dtype.name)}{frozen}")
    runs: list[list[Any]] = []  # [first name, last name, count, module, what makes it equal to another]
    for name, member in value.named_children():
        kind = repr(member), [(p.shape, p.dtype, p.requires_grad) for p in member.parameters()]
        if runs and runs[-1][4] == kind and name.isdecimal():
            runs[-1][1:3] = name, runs[-1][2] + 1
        else:
            runs.append([name, name, 1, member, kind])
    for first, last, times, member, _ in runs:
        if left[0] <= 0:
            lines.append("...")
            break
        left[0] -= 1
        count = sum(p.numel() for p in member.parameters())
        name = first if times == 1 else f"{first}-{last}"
        extra = member.extra_repr()
        kind = f"{'' if times == 1 else f'{times} x '}{type(member).__name__}({extra})"
        head = f"<code>{escape(name)}</code> {escape(kind)}" + (f", {count:,} parameters" if count else "")
        inside = _members(member, left)
        lines.append(f"<details><summary>{head}</summary>{inside}</details>" if inside else head)
    if not lines:
        return ""
    return '<ul style="margin:0;list-style:none">' + "".join(f"<li>{line}</li>" for line in lines) + "</ul>"


def run(values: Mapping[str, object], picture: str, text: str | None = None) -> str:
    """A run: what is known of it, those of the values that are not None, its curve, and a sample. picture: SVG."""
    rows = [(name, value) for name, value in values.items() if value is not None]
    return f"<div>{table(rows)}{picture}{shown(text) if text else ''}</div>"
