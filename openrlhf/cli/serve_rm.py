"""The reward server: ``python -m openrlhf.cli.serve_rm --reward_pretrain MODEL --port 5000``."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf.cli.common import run_command
from openrlhf.cli.parser import parse_config
from openrlhf.trainer.config import flag

if TYPE_CHECKING:  # torch, transformers and fastapi take seconds to import: flags are read without them
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "OPENRLHF_RM_TOKEN"
LEAST_TOKEN = 8  # characters


@dataclass(frozen=True)
class ServeConfig:
    """Serve a reward model over HTTP, with the requests and answers of OpenRLHF's reward server."""

    reward_pretrain: str | None = flag(
        None, "Reward model: folder, hub id or s3:// address", "reward.model_name_or_path", "reward_model_path"
    )
    port: int = flag(5000, "Port; 0: a free one, which is printed")
    host: str = flag("127.0.0.1", "Address to listen on; 0.0.0.0 is every network of the machine")
    max_len: int | None = flag(None, "Tokens of prompt and response; default: as the model was trained", "data.max_len")
    batch_size: int = flag(32, "Texts of concurrent requests that go through the model together")
    batch_wait_ms: float = flag(5.0, "How long a text waits for others")
    goal_state_path: str | None = flag(None, "Goal state of this model, for /goal_similarity")
    normalize_reward: bool = flag(
        False, "Subtract the mean and divide by the std that the checkpoint records", "reward.normalize_enable"
    )
    bf16: bool = flag(False, "Compute in bfloat16")
    flash_attn: bool = flag(False, "Use flash-attn where installed, else say so and use sdpa")
    attn_implementation: str | None = flag(
        None, "Attention of transformers: sdpa, eager, ...", "ds.attn_implementation"
    )
    token_file: str | None = flag(
        None, f"File with a bearer token that every request needs; default: ${TOKEN_VARIABLE}, else none"
    )
    max_texts: int = flag(4096, "Most texts of a request")
    max_characters: int = flag(16_000_000, "Most characters of all texts of a request")
    max_body_mb: int = flag(64, "Largest body of a request, in MiB")
    shutdown_s: int = flag(60, "How long a stop waits for requests that are being answered")

    def validate(self) -> None:
        """Refuse settings that cannot work, before a model is loaded.

        Raises:
            ValueError: names the flag.
        """
        if not self.reward_pretrain:
            raise ValueError("--reward_pretrain is required")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port: expected 0 to 65535, got {self.port}")
        for name in ("batch_size", "max_texts", "max_characters", "max_body_mb", "shutdown_s"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.batch_wait_ms <= 10_000:
            raise ValueError(f"--batch_wait_ms: expected 0 to 10000, got {self.batch_wait_ms:g}")
        if self.max_len is not None and self.max_len < 2:
            raise ValueError(f"--max_len must be at least 2, got {self.max_len}")


def run(config: ServeConfig) -> None:
    """Load the model and answer requests until SIGINT or SIGTERM; requests that have come are answered first.

    Raises:
        ValueError: a setting or a checkpoint that cannot be used.
        OSError: the port is taken.
    """
    config.validate()
    token = read_token(config.token_file)
    with listen(config.host, config.port) as listener:
        app = load_app(config, token)
        import uvicorn

        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        if token is None and not _is_local(host):
            logger.warning("%s is open to the network, and there is no token: pass --token_file", shown)
        print(f"serving {config.reward_pretrain} on http://{shown}:{port}/get_reward", flush=True)
        # Timeouts: a client's idle connection outlives the pause between two batches of a training.
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            timeout_keep_alive=600,
            timeout_graceful_shutdown=config.shutdown_s,
            server_header=False,
        )
        uvicorn.Server(settings).run(sockets=[listener])


def load_app(config: ServeConfig, token: str | None = None) -> FastAPI:
    """The application with its model.

    Raises:
        ValueError: the checkpoint or the goal state cannot be used.
    """
    from openrlhf.cli.common import resolve_attention
    from openrlhf.cli.reward_checkpoint import find_checkpoint
    from openrlhf.evaluation.goal_state import GoalState
    from openrlhf.rewards.model import TextScorer
    from openrlhf.serving.app import ServerLimits, build_app

    # Texts come rendered. A template matters only to tell whether a goal state was made with the same one.
    template = "{}" if config.goal_state_path is None else None
    checkpoint = find_checkpoint(config.reward_pretrain, input_template=template, max_len=config.max_len)
    goal = None if config.goal_state_path is None else checkpoint.load_goal(config.goal_state_path)
    if goal is not None and not isinstance(goal, GoalState):
        raise ValueError(f"--goal_state_path {config.goal_state_path}: expected one goal state, found one a question")
    model, tokenizer = checkpoint.load(config.bf16, resolve_attention(config.flash_attn, config.attn_implementation))
    texts = TextScorer(model, tokenizer, checkpoint.max_len, goal=goal, normalize=config.normalize_reward)
    limits = ServerLimits(texts=config.max_texts, characters=config.max_characters, body_bytes=config.max_body_mb << 20)
    return build_app(
        texts,
        name=checkpoint.name,
        batch_size=config.batch_size,
        wait_ms=config.batch_wait_ms,
        token=token,
        limits=limits,
    )


def read_token(file: str | None) -> str | None:
    """The bearer token: of a file, else of the environment; None where there is neither.

    Raises:
        ValueError: an empty or short token, or one of more than a line.
    """
    if file is not None:
        token, where = Path(file).read_text(encoding="utf-8").strip(), f"--token_file {file}"
    else:
        token, where = os.environ.get(TOKEN_VARIABLE, "").strip(), f"${TOKEN_VARIABLE}"
        if not token:
            return None
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{where}: expected a token of at least {LEAST_TOKEN} ASCII characters without blanks")
    return token


def listen(host: str, port: int) -> socket.socket:
    """A bound socket that does not answer yet, so that a taken port is told before the model is loaded.

    Raises:
        OSError: names host and port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen on {host}, port {port} ({error}); pass another --port or --host") from error
    return listener


def _is_local(host: str) -> bool:
    return host == "::1" or host.startswith("127.")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(ServeConfig, argv)))


if __name__ == "__main__":
    main()
