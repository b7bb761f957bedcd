"""What ends a run that had begun."""


class TrainingError(RuntimeError):
    """Training had to stop; the message says in one sentence why, what is left and how to go on."""
