"""See `python examples/serve_rm.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from openrlhf.cli.serve_rm import main

if __name__ == "__main__":
    main()
