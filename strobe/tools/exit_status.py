"""A program's exit status, and one sentence on standard error if it fails."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from strobe.parallel.group import RankFailed

_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF, errno.EFBIG}


def exit_status(run: Callable[[], int]) -> int:
    """Run a program and return its exit status. A ValueError, a user's mistake, is printed as one
    sentence, and so is the end of a rank; Ctrl-C and a closed pipe end it quietly."""
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except ValueError as error:
        print(f"strobe: {error}", file=sys.stderr)
        return 2
    except RankFailed as error:
        print(f"strobe: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, *_CANNOT_WRITE):
            raise
        # Python flushes standard output once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # the reader has closed the pipe
            return 141
        print(f"strobe: Standard output cannot be written: {error.strerror}.", file=sys.stderr)
        return 1
