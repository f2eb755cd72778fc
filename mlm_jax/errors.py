"""The errors that end a run, each with its exit code and a sentence for a person."""


class MlmError(Exception):
    """Base class: `command.run` prints the message and exits with `exit_code`.

    The message is one line, whatever the names that it quotes.
    """

    exit_code = 1

    def __init__(self, message):
        super().__init__(" ".join(message.splitlines()))


class InputError(MlmError, ValueError):
    """A config, argument or input file that cannot be used."""

    exit_code = 2


class NonFiniteError(MlmError, FloatingPointError):
    """The loss or the gradient stopped being a finite number, or has had too many
    spikes."""

    exit_code = 3


class CheckpointError(MlmError):
    """No checkpoint that can be used."""

    exit_code = 4


class WorkdirBusyError(MlmError):
    """Another process trains in the workdir."""

    exit_code = 5


class DamageError(MlmError):
    """A file is not what was written."""


class Preempted(MlmError):
    """Asked to stop by a signal, after saving."""

    exit_code = 75
