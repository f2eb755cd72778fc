"""What every command shares: flags, errors for people, exit codes."""

import difflib
import os
import pathlib
import re
import shutil
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from mlm_jax.config import flatten
from mlm_jax.errors import InputError, MlmError

OVERRIDE = re.compile(r"--?(no)?config\.(?P<field>[^=]+)(=(?P<value>.*))?", re.DOTALL)
CONFIG = re.compile(r"--?config(=.*)?", re.DOTALL)


def define_config():
    if "config" in flags.FLAGS:  # by another command, in the same process
        return flags.FLAGS["config"]
    return config_flags.DEFINE_config_file(
        "config", None, "Config file, with ':ARG' for its argument.", lock_config=True
    )


def define_workdir(what):
    """A flag that a command cannot do without, checked in `run`."""
    what = f"Directory of a run: {what}."
    return define_once(flags.DEFINE_string, "workdir", None, what)


def define_step():
    """The checkpoint that a command uses, where a run has several."""
    what = "Use the checkpoint of this step, not the newest."
    return define_once(flags.DEFINE_integer, "step", None, what, lower_bound=0)


def define_output(what):
    return define_once(flags.DEFINE_string, "output", None, what)


def define_pll(kinds, default):
    what = "What is hidden while a token is predicted."
    return define_once(flags.DEFINE_enum, "pll", default, list(kinds), what)


def define_color():
    what = "Colours; by default only on a terminal."
    return define_once(flags.DEFINE_bool, "color", None, what)


def define_html():
    what = "File to write the same to, as a page."
    return define_once(flags.DEFINE_string, "html", None, what)


def define_once(define, name, *arguments, **settings):
    """For flags that several commands of one process may have."""
    if name in flags.FLAGS:
        return flags.FLAGS[name]
    return define(name, *arguments, **settings)


def tell(text):
    """Prints a line about the work, beside the results."""
    print(text, file=sys.stderr)


def terminal(color):
    """Returns the settings of a text for the standard output, `color` as the flag."""
    width = min(shutil.get_terminal_size((88, 24)).columns, 100)
    return {"color": sys.stdout.isatty() if color is None else color, "width": width}


def check_html(path):
    """Raises InputError, before the work, if there is no folder for `--html`."""
    if path and not pathlib.Path(path).absolute().parent.is_dir():
        raise InputError(f"--html={path}: no such folder.")


def write_html(path, page):
    try:
        pathlib.Path(path).write_text(page, "utf-8")
    except OSError as error:
        raise InputError(f"--html={path}: {error.strerror}.") from error


def run(main, *, positional=None, needs_workdir=True):
    """Runs `main(arguments)` after parsing flags; exits with the error's code.

    `positional` names what may stand on the command line beside flags; None is nothing.
    """

    def parse(argv):
        try:
            rest = _parse(argv, needs_workdir)
            if rest[1:] and positional is None:
                raise InputError(f"unexpected argument {rest[1]!r}.")
        except MlmError as error:
            _exit(error)
        return rest

    def guarded(argv):
        logging.set_verbosity(logging.WARNING)  # libraries report every save
        try:
            main(argv[1:])
        except MlmError as error:
            _exit(error)
        except KeyboardInterrupt:
            print("error: interrupted.", file=sys.stderr)
            raise SystemExit(130) from None  # as the shell has it for SIGINT

    for name in {"config", "workdir"}.intersection(flags.FLAGS):  # shown by --help
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])
    app.run(guarded, flags_parser=parse)


def _exit(error):
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code)


def _parse(argv, needs_workdir=True):
    """Parses the flags; whatever is wrong with them is an InputError of one line."""
    if "config" in flags.FLAGS and not _asks_for_help(argv):
        _check_overrides(argv)
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        raise InputError(_first_line(error)) from error
    if needs_workdir and "workdir" in flags.FLAGS and not flags.FLAGS.workdir:
        raise InputError("--workdir=DIR is missing, such as --workdir=runs/tiny.")
    return rest


def _asks_for_help(argv):
    return any(argument.lstrip("-").startswith("help") for argument in argv[1:])


def _check_overrides(argv):
    """Refuses unknown fields, values of the wrong type, and fields given twice."""
    fields = _load_fields(argv)
    given = set()
    for argument in argv[1:]:
        match = OVERRIDE.fullmatch(argument)
        if not match:
            continue
        field = match["field"]
        check_field(field, fields)
        if field in given:
            raise InputError(f"config.{field} is given twice.")
        given.add(field)
        _check_type(field, match["value"], fields[field])


def check_field(field, fields, prefix="config."):
    """Raises InputError, with the nearest name, if there is no such field."""
    if field not in fields:
        raise InputError(
            f"{prefix}{field} does not exist{_nearest(field, fields, prefix)}"
        )


def _load_fields(argv):
    """Returns the fields of the config file alone, without the overrides."""
    argument = next((a for a in reversed(argv[1:]) if CONFIG.fullmatch(a)), "")
    return flatten(_load(argument))


def load_config(spec):
    """Returns the config of `FILE[:ARG]`. Raises InputError if it cannot be had."""
    return _load(f"--config={spec}")


def _load(argument):
    path = pathlib.Path(argument.partition("=")[2].partition(":")[0])
    if not path.name:
        raise InputError("--config=FILE is missing, such as --config=configs/tiny.py.")
    if not os.path.isfile(path):
        near = difflib.get_close_matches(path.name, _names_in(path.parent), 1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else "."
        raise InputError(f"--config={path}: no such file{hint}")
    values = flags.FlagValues()
    config_flags.DEFINE_config_file(
        "config", None, flag_values=values, sys_argv=["", argument]
    )
    try:
        values(["", argument])
        return values["config"].value
    except Exception as error:  # the file is Python, so anything can be wrong with it
        cause = error.__cause__ or error
        reason = str(cause).strip().split("\n")[-1]  # the loader puts its own before
        raise InputError(f"{argument}: {type(cause).__name__}: {reason}") from error


def _names_in(folder):
    return [path.name for path in folder.iterdir()] if os.path.isdir(folder) else []


def _nearest(field, fields, prefix):
    """Returns '; did you mean …?': the nearest path, or the nearest last name."""
    # Reversed, so that the first of several sections with a field of that name counts.
    last_names = {name.rsplit(".", 1)[-1]: name for name in reversed(fields)}
    last = field.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(field, fields, 1, 0.75)
    near = near or [
        last_names[name] for name in difflib.get_close_matches(last, last_names, 1)
    ]
    near = near or difflib.get_close_matches(field, fields, 1, 0)
    return f"; did you mean {prefix}{near[0]}?"


def _check_type(field, text, default):
    kinds = {bool: "true or false", int: "an integer", float: "a number"}
    parsers = {int: int, float: float}
    if text is None or type(default) not in parsers or isinstance(default, bool):
        if isinstance(default, bool) and str(text).lower() not in _BOOLEANS:
            raise InputError(f"config.{field} = {text!r}; expected {kinds[bool]}.")
        return
    try:
        parsers[type(default)](text)
    except ValueError as error:
        raise InputError(
            f"config.{field} = {text!r}; expected {kinds[type(default)]}, "
            f"such as {default}."
        ) from error


_BOOLEANS = ("none", "true", "false", "t", "f", "1", "0")


def _first_line(error):
    return str(error).strip().split("\n")[0] or type(error).__name__
