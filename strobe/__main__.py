"""`python -m strobe` is the command line."""

from strobe.cli.main import main

if __name__ == "__main__":
    main()
