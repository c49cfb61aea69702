"""How a program ends: its exit status, and one sentence for what went wrong."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF, errno.EFBIG}


def exit_status(run: Callable[[], int]) -> int:
    """Run a program. A ValueError, for what a user got wrong, is one sentence; Ctrl-C and
    a reader that leaves early end it quietly."""
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except ValueError as error:
        print(f"strobe: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, *_CANNOT_WRITE):
            raise
        # Python would try to write once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # nobody reads on
            return 141
        print(f"strobe: Standard output cannot be written: {error.strerror}.", file=sys.stderr)
        return 1
