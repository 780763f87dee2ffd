"""Markdown tables of docs/performance.md from the files of bench_train.py.

python benchmarks/train_table.py docs/runs/train_*.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from train_profile import KINDS


def table(head: list[str], rows: list[list[str]]) -> str:
    """A markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ours_and_peer(results: dict[str, dict]) -> tuple[dict[str, dict], dict[str, dict]]:
    """Results by name, each side's fastest first."""
    ordered = sorted(results.items(), key=lambda item: -item[1]["pairs_per_s"])
    return tuple({name: row for name, row in ordered if ("losses" in row) == side} for side in (True, False))


def summary(records: dict[str, dict]) -> str:
    """Ours at its best against the plain path, TRL's defaults and TRL at its best, a row a file."""
    rows = []
    for cell, record in records.items():
        ours, peer = ours_and_peer(record["results"])
        (name, best), strongest = next(iter(ours.items())), next(iter(peer), None)
        plain = next((row for other, row in ours.items() if other.startswith("plain")), None)
        against = [plain, peer.get("TRL defaults"), peer.get(strongest)]
        speed = [f"{best['pairs_per_s'] / row['pairs_per_s']:.2f}" if row else "" for row in against]
        memory = f"{best['memory'] / peer[strongest]['memory']:.2f}" if strongest else ""
        loss = f"{best['loss_difference']:.0e}" if "loss_difference" in best else ""
        rows.append([cell, name, *speed, strongest or "", memory, loss])
    head = "cell|ours|against plain|TRL defaults|TRL's best|which|memory against it|loss differs by".split("|")
    return table(head, rows)


def details(records: dict[str, dict]) -> str:
    """Every way of every file."""
    rows = []
    for cell, record in records.items():
        data = record["data"]
        told = f"{cell}: {data['pairs']} pairs of {data['tokens'] / data['pairs']:.0f} tokens"
        for side in ours_and_peer(record["results"]):
            for name, row in side.items():
                least, most = min(row["runs"]), max(row["runs"])
                figures = [f"{row['pairs_per_s']:.2f} ({least:.2f} to {most:.2f})", f"{row['memory']:.0f}"]
                rows.append([told, f"ours, {name}" if "losses" in row else name, *figures, f"{row['loss']:.5f}"])
                told = ""
    return table(["data", "way", "pairs/s (least, most)", "peak MiB", "mean loss"], rows)


def profiles(records: dict[str, dict]) -> str:
    """Where a step of our fastest way goes, a column a file."""
    found = {}
    for cell, record in records.items():
        _, best = next(iter(ours_and_peer(record["results"])[0].items()))
        if "profile" in best:
            found[cell] = best["profile"]
    rows = [[kind, *(f"{one['shares'][kind]:.1%}" for one in found.values())] for kind in KINDS]
    rates = {
        "GFLOP/s of the matrix products": [one["product_flops"] / one["product_seconds"] for one in found.values()],
        "the same, run alone": [one["alone_flops_per_s"] for one in found.values()],
    }
    rows += [[name, *(f"{rate / 1e9:.1f}" for rate in values)] for name, values in rates.items()]
    return table(["share of a step", *found], rows)


def main(paths: list[str]) -> None:
    if not paths:
        raise SystemExit(f"files of bench_train.py are wanted\n{__doc__}")
    records = {Path(path).stem.removeprefix("train_"): json.loads(Path(path).read_text()) for path in paths}
    print("\n\n".join(make(records) for make in (summary, details, profiles)))


if __name__ == "__main__":
    main(sys.argv[1:])
