"""One way to configure a run: frozen dataclasses, filled from one YAML file plus `a.b=value` strings.

    @dataclass(frozen=True)
    class Optimizer:
        learning_rate: float = 3e-4

    config = load(Optimizer, "run.yaml", ["learning_rate=1e-3"])

Every key must name a field, every value must have the field's type; anything else raises SettingsError with one
sentence that names the file or override, the key and what is allowed. A dataclass checks combinations of its own
fields in `__post_init__` by raising ValueError; `load` puts the place in front of that message.
"""

import dataclasses
import difflib
import math
import re
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")


class SettingsError(ValueError):
    """A configuration that cannot be used; the message is one sentence for the person who wrote it."""


def load(cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """Read the dataclass `cls` from a YAML file, with `a.b=value` overrides (values are YAML) applied on top.

    Raises SettingsError if the file is missing or no mapping, a key is unknown (a near one is named), a value has
    the wrong type, a required key is absent, or the dataclass refuses the combination.
    """
    path = Path(path)
    if not path.is_file():
        raise SettingsError(f"there is no configuration file {path}")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader) or {}
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise SettingsError(f"{path} must hold a mapping of settings, not {_describe(tree)}")
    for override in overrides:
        _apply(tree, override)
    try:
        return from_dict(cls, tree, where=str(path))
    except SettingsError as error:
        message = str(error).removeprefix(str(path))
        told = message.partition("; did you mean")[0].partition(" (allowed here")[0]  # without keys that it proposes
        keys = {override: re.escape(override.partition("=")[0]) for override in overrides}
        blamed = [override for override, key in keys.items() if re.search(rf"(?<![\w.]){key}(?!\w)", told)]
        raise SettingsError(" with ".join([str(path), *blamed]) + message) from None


def from_dict(cls: type[T], tree: dict, where: str = "settings") -> T:
    """Build the dataclass `cls` from nested mappings; `where` begins every error message."""
    return _build(cls, tree, where, "")


def to_dict(settings: Any) -> dict:
    """The settings as nested plain values, ready for YAML or JSON."""
    return dataclasses.asdict(settings)


def dump(settings: Any, path: str | Path) -> None:
    """Write the settings as YAML that `load` reads back to an equal object."""
    Path(path).write_text(yaml.safe_dump(_plain(to_dict(settings)), sort_keys=False))


class _Loader(yaml.SafeLoader):
    """YAML 1.2's floats: 1e-3 is a number, where PyYAML's 1.1 rule reads a string."""


_Loader.yaml_implicit_resolvers = {  # a copy: the class attribute is shared with SafeLoader
    first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:float"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d[\d_]*(?:[eE][-+]?\d+)?)"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


def _apply(tree: dict, override: str) -> None:
    """Set one `a.b=value` in nested mappings, in place."""
    dotted, equals, text = override.partition("=")
    if not equals or not all(dotted.split(".")):
        raise SettingsError(f"the override {override!r} must have the form section.key=value")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise SettingsError(f"the value of the override {override!r} is not valid YAML") from None
    *sections, key = dotted.split(".")
    for section in sections:
        below = tree.get(section)
        if below is None:
            below = tree[section] = {}
        if not isinstance(below, dict):
            raise SettingsError(f"the override {override!r} goes below {section!r}, which holds {_describe(below)}")
        tree = below
    tree[key] = value


def _build(cls: type, tree: Any, where: str, prefix: str) -> Any:
    """A dataclass from a mapping; `prefix` is its dotted place."""
    if not isinstance(tree, dict):
        raise SettingsError(f"{where}: {prefix.rstrip('.') or 'the file'} must be a mapping, not {_describe(tree)}")
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in tree:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.5)
            guess = f"; did you mean {prefix}{near[0]}?" if near else ""
            raise SettingsError(f"{where}: unknown key {prefix}{key}{guess} (allowed here: {', '.join(fields)})")
    values = {key: _convert(hints[key], value, where, prefix + key) for key, value in tree.items()}
    for name, field in fields.items():
        if name in values:
            continue
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise SettingsError(f"{where}: the key {prefix}{name} is required")
    try:
        return cls(**values)
    except SettingsError:
        raise
    except ValueError as error:
        raise SettingsError(f"{where}: {error}") from None


def _convert(hint: Any, value: Any, where: str, place: str) -> Any:
    """`value` as the type `hint`, or SettingsError."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        errors = []
        for choice in (a for a in arguments if a is not type(None)):
            try:
                return _convert(choice, value, where, place)
            except SettingsError as error:
                errors.append(error)
        if len(errors) == 1:  # Optional[X]: X's own message says most
            raise errors[0]
    elif origin is Literal:
        if value in arguments and type(value) in map(type, arguments):
            return value
        near = difflib.get_close_matches(str(value), [str(a) for a in arguments], n=1)
        hint_text = f"; did you mean {near[0]}?" if near else ""
        allowed = ", ".join(map(str, arguments))
        raise SettingsError(f"{where}: {place} must be one of {allowed}, not {value!r}{hint_text}")
    elif dataclasses.is_dataclass(hint):
        return _build(hint, value, where, place + ".")
    elif origin in (list, tuple) and isinstance(value, list | tuple):
        item = arguments[0] if arguments else Any
        return origin(_convert(item, entry, where, f"{place}[{i}]") for i, entry in enumerate(value))
    elif origin is dict and isinstance(value, dict):
        return {
            _convert(arguments[0], key, where, f"a key of {place}"): _convert(
                arguments[1], entry, where, f"{place}.{key}"
            )
            for key, entry in value.items()
        }
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise SettingsError(f"{where}: {place} must be a finite number, not {value}")
        return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise SettingsError(f"{where}: {place} must be {_name(hint)}, not {_describe(value)}")


_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
_NAMES |= {list: "a list", tuple: "a list", dict: "a mapping"}


def _name(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_name(choice) for choice in get_args(hint))
    base = get_origin(hint) or hint
    return _NAMES.get(base, "a mapping" if dataclasses.is_dataclass(base) else str(base))


def _describe(value: Any) -> str:
    kind = _NAMES.get(type(value), type(value).__name__)
    return kind if isinstance(value, dict | list) or value is None else f"{kind} ({value!r})"


def _plain(value: Any) -> Any:
    """Tuples as lists, so that YAML stays free of Python tags."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
