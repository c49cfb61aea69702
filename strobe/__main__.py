"""`python -m strobe` is the command line."""

import sys

from strobe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
