"""`python -m kccl.bench.tune`: see tune.py."""

import sys

from .tune import main

if __name__ == "__main__":
    sys.exit(main())
