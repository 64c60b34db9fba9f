"""Errors that users can fix: messages name the cause, the value received and the option that fixes it."""


class UserError(ValueError):
    """A user's mistake, shown as one message without a traceback."""


class ConfigError(UserError):
    """An option, a configuration file or a combination of them that cannot work."""


class DataError(UserError):
    """Input data that cannot be used."""


class NonFiniteError(UserError):
    """The loss became NaN or infinite; the message names the step."""


class CheckpointError(UserError):
    """A checkpoint or a run folder that cannot be read or written."""


class LaunchError(UserError):
    """The ranks of one job do not fit together, or the launcher is not usable."""
