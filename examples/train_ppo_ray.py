"""Train a policy on a Ray cluster: `python examples/train_ppo_ray.py --prompt_data DATA ...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from openrlhf.cli.train_ppo_ray import main

if __name__ == "__main__":
    main()
