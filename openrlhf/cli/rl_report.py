"""Report of reinforcement-learning runs: ``python -m openrlhf.cli.rl_report RUN_FOLDER [RUN_FOLDER ...]``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openrlhf.cli.common import run_command
from openrlhf.cli.parser import parse_config
from openrlhf.trainer.config import flag
from openrlhf.utils.atomic import ensure_writable
from openrlhf.utils.run_log import CURVES_NAME, REPORT_NAME


@dataclass(frozen=True)
class RLReportConfig:
    """Write report.html and curves.png of runs of train_ppo; those that differ in their seed are averaged."""

    run_folder: list[str] | None = flag(None, "--save_path of runs; also given first, without the flag")
    save_dir: str | None = flag(None, "Folder of the two files; default: that of the run, where it is one")
    title: str | None = flag(None, "Heading; default: the name of the run")
    by_folder: bool = flag(False, "Runs in the same folder are repetitions, whatever their settings")
    metrics: list[str] | None = flag(None, "Curves of the picture, such as eval/gold_reward train/kl; default: all")

    def validate(self) -> None:
        """Refuse settings that cannot work, before anything is read.

        Raises:
            ValueError: names the flag.
        """
        if not self.run_folder:
            raise ValueError("pass the --save_path of runs of train_ppo: rl_report RUN_FOLDER [RUN_FOLDER ...]")
        if self.save_dir is None and len(self.run_folder) > 1:
            raise ValueError(f"{len(self.run_folder)} runs share one report: name its folder by --save_dir")

    @property
    def target(self) -> Path:
        """Folder of the files."""
        return Path(self.save_dir or self.run_folder[0])


def run(config: RLReportConfig) -> list[Path]:
    """Read the runs and write both files; returns their paths.

    Raises:
        ValueError: a setting or a folder that cannot be used, or runs that have logged nothing.
    """
    config.validate()
    from openrlhf.trainer.ppo_curves import plot_curves
    from openrlhf.trainer.ppo_records import read_runs
    from openrlhf.trainer.ppo_report import write_run_report
    from openrlhf.trainer.ppo_table import held_out_table

    runs = read_runs(config.run_folder, config.by_folder)
    ensure_writable(config.target, inside=True)
    written = [write_run_report(config.target / REPORT_NAME, runs, title=config.title)]
    if any(run.train or run.evaluations for run in runs):
        written.append(plot_curves(runs, config.target / CURVES_NAME, config.metrics))
    print(held_out_table(runs))
    print("\n".join(map(str, written)))
    return written


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; folders before the first flag need no flag of their own."""
    words = list(sys.argv[1:] if argv is None else argv)
    words = ["--run_folder", *words] if words and not words[0].startswith("-") else words
    run_command(lambda: run(parse_config(RLReportConfig, words)) and None)


if __name__ == "__main__":
    main()
