"""See `python examples/rl_report.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from openrlhf.cli.rl_report import main

if __name__ == "__main__":
    main()
