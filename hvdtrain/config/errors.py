"""Errors that users can fix.

Messages name the cause, the value received and the option that fixes it.
"""

import re
from collections.abc import Mapping

_OPTION = re.compile("\x02(--)?([a-z_]+)(?:=([^\x03]*))?\x03")
"""An option as `opt` encodes it, between control characters that user text never contains; a flag begins with --."""
_UNQUOTED = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?|True|False|None|[A-Z]")
"""Values that Python writes without quotes, and placeholders (N)."""


class UserError(ValueError):
    """A user's mistake, shown as one message without a traceback.

    `str()` names options as arguments of a script. `message` has them as `opt` encodes them, and
    `on_command_line(error.message)` names them as flags.
    """

    _keras_call_info_injected = True
    """Stops Keras from rewriting the message when the error passes through a layer's `call`."""

    def __str__(self) -> str:
        return in_script(self.message)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    @property
    def message(self) -> str:
        """The raw message with encoded options, to be rendered later or embedded in another one."""
        return str(self.args[0]) if self.args else ""


class ConfigError(UserError):
    """An option, configuration file or combination of options that cannot work."""


class OptionError(ConfigError):
    """An option's value that is invalid, or does not go with another option or a fact of the job.

    `option`, `value`, `problem` and `advice` are what the message joins; empty if another rank raised the error.
    """

    def __init__(
        self, message: str, *, option: str = "", value: object = None, problem: str = "", advice: str = ""
    ) -> None:
        super().__init__(message)
        self.option, self.value, self.problem, self.advice = option, value, problem, advice

    @classmethod
    def of(
        cls,
        option: str,
        value: object,
        problem: str,
        advice: str = "",
        *,
        shown: str | None = None,
        received: str = "",
        sentence: bool = False,
        argument: bool = True,
    ) -> "OptionError":
        """Return the error of `option`, called `shown` in the message; a `sentence` separates problem and advice.

        Without `shown`, `argument` says whether scripts have it.
        """
        if not advice:
            end = f". Received: {value!r}."
        else:
            end = f". {advice[0].upper()}{advice[1:]}." if sentence else f": {advice}."
        message = f"{shown or opt(option, argument=argument)} {problem}{end}{received}"
        return cls(message, option=option, value=value, problem=problem, advice=advice)


class DataError(UserError):
    """Input data that cannot be used."""


class NoSamplesError(DataError):
    """Input data without a single sample."""


class BadStepError(UserError):
    """A loss spike, or too many bad steps; the message names the step."""


class NonFiniteError(BadStepError):
    """Loss, gradient or parameters became NaN or infinite; the message names the step."""


class DesyncError(UserError):
    """Replicas have diverged; the message names the variables and the ranks."""


class CheckpointError(UserError):
    """A checkpoint or a run folder that cannot be read or written."""


class ExportError(UserError):
    """A model that a format cannot hold, or an exported one that its runtime cannot run."""


class LaunchError(UserError):
    """A job's ranks do not fit together, or its launcher is unusable."""


class LoneRanksError(LaunchError):
    """Several processes were started but cannot find one another; each would train its own model.

    `rank` is the rank in the job or on this host; the lowest rank reports the error.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class MissingRankError(LaunchError):
    """A rank did not reach a synchronization point in time."""


class CompatibilityError(UserError):
    """A library violates an assumption; the message names its version and the affected code."""


class SetupError(UserError):
    """A prerequisite for building Horovod is missing, or a build step failed."""


def opt(name: str, value: object = None, *, argument: bool = True) -> str:
    """Encode an option for an error message, rendered as argument or flag.

    One that is no argument of a Python function is rendered as a flag in scripts, too; a capital letter as value is a
    placeholder.
    """
    called = name if argument else f"--{name}"
    return f"\x02{called}\x03" if value is None else f"\x02{called}={value}\x03"


def in_script(message: str, called: Mapping[str, str] | None = None) -> str:
    """Render a message's options as Python arguments: `precision='mixed_bfloat16'`.

    `called` has other renderings, by option name or by `name=value`.
    """
    return _OPTION.sub(lambda found: _as_argument(found, called or {}), message)


def on_command_line(message: str) -> str:
    """Render a message's options as flags: `--precision mixed_bfloat16`."""
    return _OPTION.sub(_as_flag, message)


def _as_argument(found: re.Match[str], called: Mapping[str, str]) -> str:
    flag, name, value = found.groups()
    if f"{name}={value}" in called:
        return called[f"{name}={value}"]
    if flag and name not in called:
        return _as_flag(found)
    argument = called.get(name, name)
    if value is None:
        return argument
    return f"{argument}={value}" if _UNQUOTED.fullmatch(value) else f"{argument}={value!r}"


def _as_flag(found: re.Match[str]) -> str:
    _, name, value = found.groups()
    flag = f"--{name.replace('_', '-')}"
    return flag if value is None else f"{flag} {value}"
