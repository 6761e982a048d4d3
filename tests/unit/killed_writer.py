"""A process that kills itself at a chosen moment of what it writes."""

import os
import signal

CALLS = (
    "open",
    "pwrite",
    "fdatasync",
    "fsync",
    "replace",
    "fchmod",
    "unlink",
    "preadv",
    "ftruncate",
)


def kill_after(last):
    """From here on SIGKILL comes before the call to the system that follows the next `last`."""
    calls = [0]

    def counted(call):
        def counting(*arguments, **options):
            calls[0] += 1
            if calls[0] > last:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return counting

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
