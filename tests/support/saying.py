"""Runs a command of kccl whose models say what a test wants.

The first argument is a JSON list of answers, and the others are kccl's.
"""

import json
import sys

from scripted import Script

from kccl.engine.api import Engine
from kccl.tools.cli import main

_begin = Engine.__init__


def _scripted(self, *args, **given):
    _begin(self, *args, **given)
    script = Script(self)
    script.answers = answers
    vars(self._runner)["tokens"] = script.tokens


if __name__ == "__main__":
    answers = json.loads(sys.argv[1])
    Engine.__init__ = _scripted
    sys.exit(main(sys.argv[2:]))
