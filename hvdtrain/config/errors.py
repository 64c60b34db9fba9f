"""Errors that users can fix: messages name the cause, the value received and the option that fixes it."""

import re
from collections.abc import Mapping

_OPTION = re.compile("\x02([a-z_]+)(?:=([^\x03]*))?\x03")
"""An option in a message, as `opt` writes it: in characters that no text of a user's has."""
ARGUMENTS = frozenset(
    (
        *("accumulate", "precision", "sync_batch_norm", "jit", "recompute", "clip_norm", "clip_value"),
        *("reduce_op", "compression", "sparse_gradients", "gradient_groups", "predivide"),
        *("pipeline_schedule", "virtual_stages", "pipeline_stages"),
        *("zero", "zero_prefetch", "local_steps", "average_slots"),
        *("on_bad_step", "spike_threshold", "max_bad_steps", "desync_every"),
        *("loss", "metrics", "optimizer", "seed", "batch", "epochs", "shuffle", "log_every"),
        *("steps_per_epoch", "validation_steps", "elastic", "commit_every"),
        *("backend", "replicas", "communication", "parameter_servers", "threads", "pin", "malloc"),
        *("start_timeout", "load_timeout", "hang_timeout", "link_timeout"),
        *("deterministic", "hierarchical_allreduce", "parallel", "sequence_parallel"),
        *("timeline", "profile", "profile_ranks"),
        *("learning_rate", "lr_scaling", "base_batch", "schedule", "warmup_steps"),
        *("final_rate", "decay_power", "decay_at", "decay_factor"),
    )
)
"""Options that scripts have too, as arguments of `Trainer`, `fit`, `init` and `learning_rate_schedule`."""
_UNQUOTED = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?|True|False|None|[A-Z]")
"""Values that Python takes without quotes, and placeholders (N)."""


class UserError(ValueError):
    """A user's mistake, shown as one message without a traceback.

    Messages name options by `opt("accumulate")` or `opt("precision", "mixed_bfloat16")`, which are worded for whoever
    reads them: by `str()` for a script, which has arguments, and by `on_command_line(error.message)` for the command
    line. What else is in a message, such as a user's own text, stays as it is.
    """

    _keras_call_info_injected = True
    """Keras leaves the message as it is, where it would put one of a layer's `call` between the call's arguments."""

    def __str__(self) -> str:
        return in_script(self.message)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    @property
    def message(self) -> str:
        """The message as it was written, to be worded later or to become part of another one."""
        return str(self.args[0]) if self.args else ""


class ConfigError(UserError):
    """An option, a configuration file or a combination of them that cannot work."""


class DataError(UserError):
    """Input data that cannot be used."""


class NoSamplesError(DataError):
    """Input data without a single sample."""


class BadStepError(UserError):
    """A step whose loss is a spike, or too many bad steps; the message names the step."""


class NonFiniteError(BadStepError):
    """Loss, gradient or parameters became NaN or infinite; the message names the step."""


class DesyncError(UserError):
    """Ranks hold different weights where they must be equal; the message names the variables and the ranks."""


class CheckpointError(UserError):
    """A checkpoint or a run folder that cannot be read or written."""


class LaunchError(UserError):
    """The ranks of one job do not fit together, or the launcher is not usable."""


class LoneRanksError(LaunchError):
    """A launcher started several processes that cannot find one another; each would train a model of its own.

    Args:
        message: the error.
        rank: this process's number among those that are sure to meet the error, the first of which shows it: of the
            job, or of this host.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class MissingRankError(LaunchError):
    """A rank did not come to where the others wait for it."""


class CompatibilityError(UserError):
    """A library does not do what hvdtrain relies on; the message names the library's version and who relies on it."""


class SetupError(UserError):
    """Something that building or installing Horovod needs is missing, or a step of it failed."""


def opt(name: str, value: object = None) -> str:
    """Name an option in a message, with a value if there is one, to be worded for whoever reads the message.

    Args:
        name: of its field in `config`. For a script it is a flag as well, if it is none of `ARGUMENTS`.
        value: of the option; a capital letter stands for any.
    """
    return f"\x02{name}\x03" if value is None else f"\x02{name}={value}\x03"


def in_script(message: str, called: Mapping[str, str] | None = None) -> str:
    """Word the options of a message as arguments: `accumulate`, `precision='mixed_bfloat16'`.

    Args:
        message: as it was written.
        called: what else options are called, by their name or by `name=value`.
    """
    return _OPTION.sub(lambda found: _as_argument(found, called or {}), message)


def on_command_line(message: str) -> str:
    """Word the options of a message as one types them: `--accumulate`, `--precision mixed_bfloat16`."""
    return _OPTION.sub(_as_flag, message)


def _as_argument(found: re.Match[str], called: Mapping[str, str]) -> str:
    name, value = found.groups()
    if name not in ARGUMENTS:
        return _as_flag(found)
    if f"{name}={value}" in called:
        return called[f"{name}={value}"]
    argument = called.get(name, name)
    if value is None:
        return argument
    return f"{argument}={value}" if _UNQUOTED.fullmatch(value) else f"{argument}={value!r}"


def _as_flag(found: re.Match[str]) -> str:
    name, value = found.groups()
    flag = f"--{name.replace('_', '-')}"
    return flag if value is None else f"{flag} {value}"
