"""Makes tests/support importable for programs that pytest does not start."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))
