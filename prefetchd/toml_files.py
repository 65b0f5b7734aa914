"""Small TOML files that people edit by hand: read strictly, written plainly.

Target and profile files decide what is compiled, so a mistyped key must never be ignored: an unknown key is
an error that names the closest known one, a wrong type names the key and its value. The writer knows only
what these files need: scalars, lists of strings, one-line tables of scalars, and a list of tables.
"""

from __future__ import annotations

import difflib
import json
import os
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


def read_toml(path: Path, error: type[ValueError]) -> dict[str, Any]:
    """The file's top-level table. Raises `error` for a missing, unreadable or malformed file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror or problem}; check the path") from problem
    except UnicodeDecodeError as problem:
        raise error(f"{path}: is not UTF-8 text ({problem.reason}); save it as UTF-8") from problem
    except tomllib.TOMLDecodeError as problem:
        raise error(f"{path}: is not valid TOML: {problem}; fix the syntax there") from problem


def check_keys(keys: Iterable[str], known: Iterable[str], where: str, error: type[ValueError]) -> None:
    """Raises `error` for the first key that is not known, with the closest known one."""
    known = tuple(known)
    for key in keys:
        if key in known:
            continue
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
        raise error(f"{where}: unknown key {key!r}; {hint}")


def build(cls: type[T], table: Mapping[str, Any], where: str, error: type[ValueError]) -> T:
    """One struct from one table. Raises `error` naming the key and its value."""
    fields = msgspec.structs.fields(cls)
    check_keys(table, [field.name for field in fields], where, error)
    values: dict[str, Any] = {}
    for field in fields:
        if field.name in table:
            value = table[field.name]
            try:
                values[field.name] = msgspec.convert(value, field.type)
            except msgspec.ValidationError as problem:
                raise error(f"{where}: {field.name} = {value!r}: {problem}; correct the value") from problem
        elif field.required:
            raise error(f"{where}: the key {field.name!r} is missing; add it")
    try:
        return cls(**values)
    except error as problem:
        raise error(f"{where}: {problem}") from problem


def format_value(value: object) -> str:
    """A scalar, a list of scalars or a one-line table of scalars as TOML text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{format_value(k)} = {format_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    raise TypeError(f"no TOML form for {type(value).__name__} {value!r}")


def format_table(table: Mapping[str, object]) -> str:
    """`key = value` lines; the keys are bare words."""
    return "".join(f"{key} = {format_value(value)}\n" for key, value in table.items())


def write_text(path: Path, text: str) -> None:
    """Replaces the file in one step, so that a reader sees the old text or the new, never half of it.

    Raises `OSError` with this path, since the name of the temporary file says nothing to anybody.
    """
    try:
        _replace(path, text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            # mkstemp makes a private file; these are meant to be shared like any text file.
            os.fchmod(stream.fileno(), 0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
