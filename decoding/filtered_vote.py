"""Live filtered voting beside plain voting with the same seeds: ``python decoding/filtered_vote.py --input_file ...``.

The flags of generate.py, whose `--methods` are majority and filtered_vote here; what they save and lose is printed as
compare.py does. With --dry_run nothing is drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from decoding import compare, generate
from decoding.config import DecodingConfig
from openrlhf.cli.common import run_command
from openrlhf.cli.parser import parse_config

METHODS = ("majority", "filtered_vote")


def run(config: DecodingConfig) -> None:
    """Answer all questions both ways and compare the answers.

    Raises:
        ValueError: as `generate.run` and `compare.run`.
    """
    if generate.run(config) is not None:
        print()
        compare.run(compare.CompareConfig([config.output_dir]))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    words = ["--methods", *METHODS, *(sys.argv[1:] if argv is None else argv)]
    run_command(lambda: run(parse_config(DecodingConfig, words)))


if __name__ == "__main__":
    main()
