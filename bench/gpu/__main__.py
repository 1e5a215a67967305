"""`python3 -m kccl.bench.gpu`: see make_gpu.py."""

import sys

from .make_gpu import main

if __name__ == "__main__":
    sys.exit(main())
