"""Train a language model: `deepspeed examples/train_sft.py --pretrain MODEL --dataset DATA --save_path DIR`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from openrlhf.cli.train_sft import main

if __name__ == "__main__":
    main()
