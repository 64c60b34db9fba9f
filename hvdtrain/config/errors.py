"""Errors that users can fix.

Messages name the cause, the value received and the option that fixes it.
"""

import re
from collections.abc import Mapping

_OPTION = re.compile("\x02([a-z_]+)(?:=([^\x03]*))?\x03")
"""An option as `opt` encodes it, between control characters that user text never contains."""
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
"""Options that are also Python arguments of `Trainer`, `fit`, `init` or `learning_rate_schedule`."""
_UNQUOTED = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?|True|False|None|[A-Z]")
"""Values that Python writes without quotes, and placeholders (N)."""


class UserError(ValueError):
    """A user's mistake, shown as one message without a traceback.

    Messages name options by `opt("accumulate")` or `opt("precision", "mixed_bfloat16")`. `str()` renders them as Python
    arguments, `on_command_line(error.message)` as flags; other text is left unchanged.
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


def opt(name: str, value: object = None) -> str:
    """Encode an option for an error message, rendered as argument or flag.

    A name outside `ARGUMENTS` is rendered as a flag in scripts, too; a capital letter as value is a placeholder.
    """
    return f"\x02{name}\x03" if value is None else f"\x02{name}={value}\x03"


def in_script(message: str, called: Mapping[str, str] | None = None) -> str:
    """Render a message's options as Python arguments: `precision='mixed_bfloat16'`.

    `called` has other renderings, by option name or by `name=value`.
    """
    return _OPTION.sub(lambda found: _as_argument(found, called or {}), message)


def on_command_line(message: str) -> str:
    """Render a message's options as flags: `--precision mixed_bfloat16`."""
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
