"""Train, score and compare a declared grid of reward models: `python examples/study.py --study FILE`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from openrlhf.cli.study import main

if __name__ == "__main__":
    main()
