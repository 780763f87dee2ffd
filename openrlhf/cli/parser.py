"""From a configuration dataclass to flags, ``--help``, ``--config file.yaml`` and good errors."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

Config = TypeVar("Config")


class FlagFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help that leaves the spellings with dashes out: every flag has them."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        spellings = action.option_strings
        action.option_strings = [s for s in spellings if "-" not in s.lstrip("-")] or spellings
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = spellings


class FlagParser(argparse.ArgumentParser):
    """Flags of a configuration dataclass, as transformers' HfArgumentParser makes them, without its import.

    Every field is a flag with underscores, with dashes, and under the aliases of its metadata. No abbreviations; the
    error on an unknown flag names the nearest known one. Flags of other programs, a mapping of reasons to prefixes in
    the class's `foreign_flags`, are all told at once with the reason why there is no such thing here.
    """

    def __init__(self, config_class: type, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=FlagFormatter, **settings)
        self.foreign: Mapping[str, Sequence[str]] = getattr(config_class, "foreign_flags", {})
        hints = get_type_hints(config_class)
        for field in dataclasses.fields(config_class):
            if field.init:
                self.add_field(field, hints[field.name])

    def add_field(self, field: dataclasses.Field, hint: Any) -> None:
        """Add the flag of one field; a switch that is on by default also gets ``--no_NAME``.

        Args:
            hint: text, number, bool, list of them, Literal, or one of these or None.
        Raises:
            TypeError: another type.
        """
        spellings = dict.fromkeys([f"--{field.name}", f"--{field.name.replace('_', '-')}"])
        spellings |= dict.fromkeys(field.metadata.get("aliases", ()))
        settings: dict[str, Any] = {"help": field.metadata.get("help"), **_reading(hint, field)}
        if field.default is not dataclasses.MISSING:
            settings["default"] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            settings["default"] = field.default_factory()
        else:
            settings["required"] = True
        self.add_argument(*spellings, **settings)
        if field.default is True:
            off = dict.fromkeys([f"--no_{field.name}", f"--no-{field.name.replace('_', '-')}"])
            self.add_argument(*off, action="store_false", dest=field.name, default=True, help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        """Say it in one line, without the usage of a hundred flags, and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def known_flags(self) -> list[str]:
        """Every accepted spelling."""
        return [option for action in self._actions for option in action.option_strings]

    def unknown_flag_message(self, arguments: Sequence[str]) -> str:
        """One sentence for all flags of other programs, or else for the first argument that is no flag of this one."""
        foreign = self._foreign_flags(arguments)
        if foreign:
            told = "; ".join(f"{', '.join(flags)}: {reason}" for reason, flags in foreign.items())
            return f"drop flags that this command does not have. {told}"
        first = arguments[0]
        name = first.split("=")[0]
        if not name.startswith("-"):
            hint = "check the line above it: a blank after a line-ending backslash ends the command there"
            return f"unexpected argument {first!r}; {hint}" if not first.strip() else f"unexpected argument {first!r}"
        known = self.known_flags()
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        if not near and "." in name:  # --reward.learning_rate: try the last part of a dotted name
            near = difflib.get_close_matches("--" + name.rsplit(".", 1)[1], known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else "; see --help"
        return f"unknown flag {name}{hint}"

    def _foreign_flags(self, arguments: Sequence[str]) -> dict[str, list[str]]:
        """The flags of other programs among these words, by the reason why they are refused."""
        found: dict[str, list[str]] = {}
        for name in dict.fromkeys(word.split("=")[0] for word in arguments if word.startswith("--")):
            plain = name[2:].replace("-", "_")
            for reason, prefixes in self.foreign.items():
                if plain.startswith(tuple(prefixes)):
                    found.setdefault(reason, []).append(name)
                    break
        return found


def _reading(hint: Any, field: dataclasses.Field) -> dict[str, Any]:
    """How argparse reads the words of one flag."""
    if get_origin(hint) in (Union, types.UnionType):
        hint, *others = [kind for kind in get_args(hint) if kind is not type(None)]
        if others:
            raise TypeError(f"flag {field.name}: expected one type, or one type or None, got {field.type}")
    if get_origin(hint) is Literal:
        named = {str(choice): choice for choice in get_args(hint)}
        return {"choices": get_args(hint), "type": lambda word: named.get(word, word)}
    if get_origin(hint) is list:
        return {"type": get_args(hint)[0], "nargs": "+"}
    if hint is bool:
        return {"type": read_switch, "nargs": "?", "const": True}
    if hint not in (str, int, float):
        raise TypeError(f"flag {field.name}: no way to read {field.type} from a word")
    return {"type": hint}


def read_switch(word: str) -> bool:
    """The value after a switch, in the usual spellings of true and false."""
    if word.lower() in ("yes", "true", "t", "y", "1"):
        return True
    if word.lower() in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false (yes or no, 1 or 0), got {word!r}")


def build_parser(config_class: type[Config], description: str | None = None) -> FlagParser:
    """Parser of one configuration dataclass; ``--config FILE`` sets defaults that flags override."""
    doc = description or (config_class.__doc__ or "").strip().split("\n")[0]
    parser = FlagParser(config_class, description=doc)
    parser.add_argument("--config", metavar="FILE", help="YAML file with flag names and values; flags override it")
    return parser


def parse_config(
    config_class: type[Config], argv: Sequence[str] | None = None, description: str | None = None
) -> Config:
    """Parse flags into a configuration; a mistake prints one line and exits with code 2.

    Args:
        config_class: dataclass whose fields carry ``help`` (and ``aliases``) in their metadata.
        argv: words after the program's name; None takes the process's.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(config_class, description)
    try:
        values = _config_file_values(parser, config_class, argv)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for action in parser._actions:
        if action.dest in values:
            action.required = False
    parser.set_defaults(**values)
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(parser.unknown_flag_message(unknown))
    names = {field.name for field in dataclasses.fields(config_class) if field.init}
    return config_class(**{name: value for name, value in vars(namespace).items() if name in names})


def _config_file_values(parser: FlagParser, config_class: type, argv: list[str]) -> dict:
    """Values of ``--config``, read by the same rules as flags, by field name."""
    file = None
    for place, word in enumerate(argv):
        if word == "--config" and place + 1 < len(argv):
            file = argv[place + 1]
        elif word.startswith("--config="):
            file = word.split("=", 1)[1]
    if file is None:
        return {}
    import yaml

    try:
        loaded = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{file}: expected 'flag: value' lines, got {type(loaded).__name__}")
    words = []
    reader = build_parser(config_class)
    switches = {option for action in reader._actions if action.nargs == "?" for option in action.option_strings}
    for name, value in _flatten(loaded):
        if value is None or (value is False and "--" + name not in switches):
            continue  # left at its default, as the printed configuration shows it
        words.append("--" + name)
        words += [str(item) for item in value] if isinstance(value, list) else [str(value)]
    for action in reader._actions:
        action.required = False
    namespace, unknown = reader.parse_known_args(words)
    if unknown:
        raise ValueError(f"{file}: {reader.unknown_flag_message(unknown)}")
    given = {word for word in words if word.startswith("--")}
    chosen = {action.dest for action in reader._actions if given & set(action.option_strings)}
    return {name: value for name, value in vars(namespace).items() if name in chosen}


def _flatten(tree: dict, prefix: str = ""):
    """Nested mappings become dotted names: {train: {batch_size: 8}} -> train.batch_size."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
