"""Compare folders of generate.py: ``python decoding/compare.py OUTPUT_DIR [OUTPUT_DIR ...] --markdown FILE``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from openrlhf.cli.common import run_command
from openrlhf.cli.parser import parse_config
from openrlhf.trainer.config import flag
from openrlhf.utils.atomic import atomic_write_text, ensure_writable

OUTPUTS = ("json", "markdown", "plot")


@dataclass(frozen=True)
class CompareConfig:
    """Accuracy and cost of decoding methods on the same questions, and their difference from a baseline."""

    output_dir: list[str] | None = flag(None, "Folders that generate.py wrote; also given first, without the flag")
    labels: list[str] | None = flag(None, "Names of the folders in the tables; default: their own")
    baseline: str = flag(
        "majority",
        "Method, or LABEL/METHOD, that the others are compared with at equal policy tokens (a method of a pool), or as "
        "it is; 'none' for no comparison",
    )
    json: str | None = flag(None, "JSON file for all figures")
    markdown: str | None = flag(None, "Markdown file for the tables")
    plot: str | None = flag(None, "PNG file: accuracy against tokens a question")
    bootstrap: int = flag(1000, "Draws of questions for the 95% intervals")
    seed: int = flag(0, "Seed of the draws")

    def validate(self) -> None:
        """Refuse settings that cannot work, before anything is read.

        Raises:
            ValueError: names the flag.
        """
        if not self.output_dir:
            raise ValueError("pass the folders that generate.py wrote: compare.py OUTPUT_DIR [OUTPUT_DIR ...]")
        paths = [Path(folder).resolve() for folder in self.output_dir]
        if len(set(paths)) < len(paths):
            raise ValueError(f"a folder is given twice: {' '.join(self.output_dir)}")
        if self.labels is not None and len(self.labels) != len(paths):
            raise ValueError(f"--labels: expected one for each of {len(paths)} folders, got {self.labels}")
        if len(set(self.folders())) < len(paths):
            raise ValueError(f"--labels: expected different names, one a folder, got {list(self.labels or [])}")
        if self.bootstrap < 1 or self.seed < 0:
            raise ValueError(
                f"--bootstrap: expected 1 or more, --seed: 0 or more, got {self.bootstrap} and {self.seed}"
            )
        for name in OUTPUTS:
            file = getattr(self, name)
            if file is not None:
                if Path(file).is_dir():
                    raise ValueError(f"--{name}: expected the name of a file, {file} is a folder")
                ensure_writable(Path(file).parent, inside=True)

    def folders(self) -> dict[str, str]:
        """Folders by label; a single one without --labels needs no name."""
        names = [""] if len(self.output_dir) == 1 else [Path(folder).resolve().name for folder in self.output_dir]
        return dict(zip(self.labels or names, self.output_dir, strict=False))


def run(config: CompareConfig) -> dict[str, Any]:
    """Print the tables and write what was asked for; returns all figures.

    Raises:
        ValueError: a setting or a folder that cannot be used.
    """
    config.validate()
    from decoding.comparison import compare_methods
    from decoding.comparison_files import read_comparison
    from decoding.comparison_tables import format_comparison, plot_comparison

    folders = config.folders()
    baseline = None if config.baseline == "none" else config.baseline
    result = compare_methods(read_comparison(folders), baseline, config.bootstrap, config.seed)
    result = {"folders": folders, **result}
    text = format_comparison(result)
    print(text)
    if config.json:
        atomic_write_text(config.json, json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    if config.markdown:
        atomic_write_text(config.markdown, text)
    if config.plot:
        plot_comparison(result, config.plot)
    for name in OUTPUTS:
        if getattr(config, name):
            print(f"{name}: {getattr(config, name)}")
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; folders before the first flag need no flag of their own."""
    words = list(sys.argv[1:] if argv is None else argv)
    words = ["--output_dir", *words] if words and not words[0].startswith("-") else words
    run_command(lambda: run(parse_config(CompareConfig, words)) and None)


if __name__ == "__main__":
    main()
