"""Runs the `kccl` command where its script is not installed: `python -m kccl bench all_reduce`."""

import sys

from .tools.command import main

if __name__ == "__main__":
    sys.exit(main())
