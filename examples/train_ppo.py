"""Train a policy: `python examples/train_ppo.py --pretrain MODEL --prompt_data DATA --save_path DIR`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from openrlhf.cli.train_ppo import main

if __name__ == "__main__":
    main()
