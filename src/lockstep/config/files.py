"""A config as a file, in and out: `--config FILE`, `lockstep show --toml`, a run's config.json."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.fields import flags_of, require
from lockstep.config.flags import HABITS
from lockstep.errors import UserError, unknown

_LARGEST = 1 << 20  # bytes: a config has some thousand


def entries(plain: Any, cls: type, where: str) -> dict[str, Any]:
    """The values in a file, which has them in tables by group or flat, named as the flags; `where` names the file.
    Raises UserError for a name that no flag has, one that stands there twice, and a value that its field does not take.
    """
    if not isinstance(plain, Mapping):
        raise UserError(f"{where} is {plain!r}, not a group of entries", "`lockstep show RECIPE --toml` writes one.")
    known = flags_of(cls)
    also = {habit.strip("-").replace("-", "_"): name[2:].replace("-", "_") for habit, name in HABITS.items()}
    groups = {flag.group for flag in known.values()} - {""}
    found: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping) != (key in groups):
            raise unknown(f"table in {where}:", key, groups)
        for name, each in value.items() if key in groups else [(key, value)]:
            plainly = str(name).replace("-", "_")
            flag = known.get(also.get(plainly, plainly))
            if flag is None or (key in groups and flag.group != key):
                near = [name for name, flag in known.items() if key not in groups or flag.group == key]
                table = f" of [{key}]" if key in groups else ""
                raise unknown(f"entry{table} in {where}:", str(name), near, "They are named as the flags.")
            require(flag.field not in found, f"{where}: {name} stands there twice", "Leave one of them out.")
            try:
                found[flag.field] = flag.checked(each)
            except UserError as error:
                raise UserError(f"{where}: {error.message}", error.remedy) from error
    return found


def read_values(path: str) -> dict[str, Any]:
    """What a file says, nested as it is there.
    Raises UserError where it can't be read, or is neither TOML nor a config.json.
    """
    kind = "JSON" if path.endswith(".json") else "TOML"
    try:
        if not Path(path).is_file():
            raise UserError(f"--config {path}: there is no such file", "Name a .toml file, or a run's config.json.")
        if Path(path).stat().st_size > _LARGEST:
            raise UserError(f"--config {path}: {Path(path).stat().st_size:,} bytes are no config", "Name another file.")
        text = Path(path).read_text(encoding="utf-8")
        values = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--config {path}: can't be read as {kind} ({error})", f"Write it as {kind}.") from error
    require(isinstance(values, dict), f"--config {path} holds no table", "`lockstep show RECIPE --toml` writes one.")
    if kind == "JSON" and isinstance(values.get("execution"), dict):
        values["execution"].pop("out", None)  # another run than the one that wrote it
    return dict(values)


def to_toml(config: Any) -> str:
    """Every value of a config, its groups as tables; `entries` reads it."""
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
    escaped = json.dumps(str(value), ensure_ascii=False)  # TOML's basic strings are JSON's but for what has no letter
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped)
