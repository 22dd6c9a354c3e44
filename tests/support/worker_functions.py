"""Functions that run in worker processes, which import them by name."""

import os
import signal


def square_or_fail(number: int) -> int:
    """The square; of 3 an exception, and 5 kills the process."""
    if number == 3:
        raise ZeroDivisionError("three")
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number
