"""A config as a TOML file, in and out: `--config FILE`, `lockstep show --toml`. A run's config.json goes in too."""

import dataclasses
import json
import tomllib
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.config.flags import known_flags
from lockstep.errors import UserError, unknown

_LARGEST = 1 << 20  # bytes: a config has some thousand


def to_toml(config: Config) -> str:
    """Every value of a config, its groups as tables; `read_config` makes the same config of it, over any other."""
    lines, tables = [], []
    for name, value in config.to_dict().items():
        if isinstance(value, dict):
            tables += ["", f"[{name}]", *(f"{key} = {_written(inner)}" for key, inner in value.items())]
        else:
            lines.append(f"{name} = {_written(value)}")
    return "\n".join([*lines, *tables, ""])


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    escaped = json.dumps(str(value), ensure_ascii=False)  # TOML's basic strings are JSON's, but for one character
    return escaped.replace("\x7f", "\\u007f")


def read_values(path: str) -> dict[str, Any]:
    """What a file says, nested as it is there.

    Raises:
        UserError: where it can't be read, or is neither TOML nor a config.json.
    """
    try:
        if not Path(path).is_file():
            raise UserError(f"--config {path}: there is no such file", "Name a .toml file, or a run's config.json.")
        if Path(path).stat().st_size > _LARGEST:
            raise UserError(f"--config {path}: {Path(path).stat().st_size:,} bytes are no config", "Name another file.")
        text = Path(path).read_text(encoding="utf-8")
        values = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        kind = "JSON" if path.endswith(".json") else "TOML"
        raise UserError(f"--config {path}: can't be read as {kind} ({error})", f"Write it as {kind}.") from error
    if isinstance(values, dict) and path.endswith(".json") and isinstance(values.get("execution"), dict):
        values["execution"].pop("out", None)  # another run than the one that wrote it
    if not isinstance(values, dict):
        raise UserError(f"--config {path} holds no table", "`lockstep show RECIPE --toml` writes one.")
    return values


def applied(values: Mapping[str, Any], base: Config, path: str) -> Config:
    """`base` with a file's values: in tables as `config.json` has them, or flat under the names of flags.

    Raises:
        UserError: for a name that no flag has, with the nearest ones, one that stands there twice, and for values that
            make no run.
    """
    places, nested = _places(Config), base.to_dict()
    seen: dict[tuple[str, ...], str] = {}
    for typed, where, value in _leaves(values, path):
        if typed == "recipe" and not where:
            continue
        found = places.get(typed.replace("-", "_"))
        if found is None or (where and found[:-1] != where):
            known = [name for name, place in places.items() if not where or place[:-1] == where]
            table = f" of [{'.'.join(where)}]" if where else ""
            raise unknown(f"entry{table} in {path}:", typed, known, "They are named as the flags.")
        if found in seen:
            raise UserError(f"{path}: {seen[found]} and {typed} are the same entry", "Leave one of the two out.")
        seen[found] = typed
        group = nested
        for name in found[:-1]:
            group = group[name]
        group[found[-1]] = value
    if isinstance(values.get("recipe"), str) and base.recipe == "":
        nested["recipe"] = values["recipe"]
    try:
        return Config.from_dict(nested)
    except UserError as error:
        raise UserError(f"{path}: {error.message}", error.remedy.replace("; was config.json edited?", ".")) from error


def _leaves(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """(name, its table, value) of a file's entries."""
    groups = [name for name, hint in typing.get_type_hints(Config).items() if dataclasses.is_dataclass(hint)]
    for name, value in values.items():
        if name in groups and isinstance(value, Mapping):
            for inner, each in value.items():
                yield inner, (name,), each
        elif isinstance(value, Mapping):
            raise unknown(f"table in {path}:", name, groups)
        else:
            yield name, (), value


def _places(cls: type, before: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    """By name of a flag, with underscores, where its value stands in a nested config."""
    found: dict[str, tuple[str, ...]] = {}
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            found |= _places(typing.cast(type, hint), (*before, name))
        elif name != "recipe":
            found[name] = (*before, name)
    if not before:  # what a flag is called besides
        for flag in known_flags(cls).values():
            own = flag.names[0].removeprefix("--").replace("-", "_")
            for alias in flag.names[1:] if flag.takes_value else ():
                found[alias.removeprefix("--").replace("-", "_")] = found[own]
    return found


def take_file(args: list[str]) -> tuple[str, list[str]]:
    """The file that `--config` names, or nothing, and the other arguments. Raises UserError for two of them."""
    files, rest, queue = [], [], iter(args)
    for argument in queue:
        typed, equals, value = argument.partition("=")
        if typed != "--config":
            rest.append(argument)
            continue
        named = value if equals else next(queue, "")
        if not named or named.startswith("--"):
            raise UserError("--config names no file", "Give it as --config FILE.toml.")
        files.append(named)
    if len(files) > 1:
        raise UserError(f"--config stands there {len(files)} times", "Name one file; flags after it change it.")
    return "".join(files), rest
