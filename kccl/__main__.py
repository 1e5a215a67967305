"""`python -m kccl bench all_reduce`: the command where its script is not installed."""

import sys

from .tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
