"""`python -m kccl bench all_reduce`: the command where its script is not installed."""

import sys

from .cli import main

sys.exit(main())
