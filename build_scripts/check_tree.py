"""Structure of the tree: layers, light imports, shell scripts, links and names in the documents, private text.

Run by build_scripts/check.sh. Prints one line per fault and exits with 1 when there is any.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# What each part of the package may import besides itself.
LAYERS = {
    "utils": set(),
    "datasets": {"utils"},
    "models": {"utils", "datasets"},
    "rewards": {"utils", "datasets", "models", "evaluation"},
    "evaluation": {"utils", "datasets", "models", "rewards"},
    "trainer": {"utils", "datasets", "models", "rewards", "evaluation"},
    "cli": {"utils", "datasets", "models", "rewards", "evaluation", "trainer", "serving"},
    "serving": {"utils", "datasets", "models", "rewards", "evaluation", "trainer"},
}
# Import paths that users know, filled when a name is asked for: the only imports against the layers.
LAZY_REEXPORTS = {"openrlhf/utils/__init__.py", "openrlhf/utils/agent.py"}
DISTRIBUTED_HOME = "openrlhf/trainer/deepspeed_engine.py"
HEAVY = ("deepspeed", "ray", "vllm", "wandb")
# Modules that may load the heavy packages when imported.
HEAVY_MODULES = {"openrlhf.trainer.deepspeed_engine"}

TEXT_SUFFIXES = {".py", ".sh", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".cfg", ""}
PRIVATE = [
    re.compile(pattern)
    for pattern in (
        r"(?<![\w.])/(?:work|farm|root(?!/\.cache))/",
        r"/(?:home|Users)/[a-z]\w*/",
        r"[.]library\b|bash_[j]obs",
        r"\bpypi\.org\b|python[h]osted",
        r"(?<![\d.=])(?:10\.\d{1,3}|192\.168|172\.(?:1[6-9]|2\d|3[01]))\.\d{1,3}\.\d{1,3}(?![\d.])",
        r"\bAKIA[0-9A-Z]{16}\b|\bhf_[A-Za-z0-9]{30,}",
    )
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MODULE = re.compile(r"(?<![\w./-])openrlhf(?:\.[A-Za-z_]\w*)+")
PROJECT_PATH = re.compile(
    r"(?<![\w./-])(?:openrlhf|decoding|examples|run_scripts|build_scripts|benchmarks|tests|docs)/[\w./-]+\.(?:py|sh|md|json|npy)\b"
)


def tracked_files(root: Path) -> list[Path]:
    """Files of the project: those git tracks or would add; without git all but hidden folders."""
    try:
        command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
        files = [root / name for name in names if name]
    except (OSError, subprocess.CalledProcessError):
        files = [
            path
            for path in root.rglob("*")
            if not any(part.startswith(".") and part != ".ci" for part in path.relative_to(root).parts)
        ]
    return sorted(path for path in files if path.is_file())


def imported_names(tree: ast.Module, module: str) -> Iterator[tuple[int, str, bool]]:
    """(line, absolute module name, whether it runs at import) of every import; `from a import b` gives a.b."""
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) not in lazy
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}", id(node) not in lazy


def module_name(path: Path, root: Path) -> str:
    """Dotted name of a file of the package; a package's __init__ keeps that part, so that levels count alike."""
    return ".".join(path.relative_to(root).with_suffix("").parts)


def check_layers(files: list[Path], root: Path) -> list[str]:
    """Imports against the layers, and deepspeed or torch.distributed outside of their home."""
    faults = []
    for path in files:
        name = path.relative_to(root).as_posix()
        if path.suffix != ".py" or not name.startswith(("openrlhf/", "decoding/", "examples/")):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), name)
        parts = Path(name).parts
        own = parts[1] if parts[0] == "openrlhf" and len(parts) > 2 else None
        for line, target, at_import in imported_names(tree, module_name(path, root)):
            words = target.split(".")
            if words[0] == "openrlhf" and own in LAYERS and len(words) > 1 and words[1] in LAYERS:
                allowed = words[1] == own or words[1] in LAYERS[own]
                if not allowed and not (name in LAZY_REEXPORTS and not at_import):
                    faults.append(f"{name}:{line}: openrlhf.{own} must not import openrlhf.{words[1]}")
            if words[0] in ("decoding", "examples") and parts[0] == "openrlhf":
                faults.append(f"{name}:{line}: the package must not import {words[0]}")
            if parts[0] != "openrlhf" or name == DISTRIBUTED_HOME:
                continue
            if words[0] == "deepspeed" or words[:2] == ["torch", "distributed"]:
                faults.append(f"{name}:{line}: only {DISTRIBUTED_HOME} imports {target}")
            elif words[0] in HEAVY and at_import:
                faults.append(f"{name}:{line}: {words[0]} must be imported inside a function")
    return faults


def check_light_imports(files: list[Path], root: Path) -> list[str]:
    """Modules of the packages whose import brings in a heavy package, or fails; all imported in one fresh process."""
    modules = []
    for path in files:
        name = path.relative_to(root).as_posix()
        if path.suffix == ".py" and name.startswith(("openrlhf/", "decoding/")):
            module = module_name(path, root).removesuffix(".__init__")
            if module not in HEAVY_MODULES and not module.endswith("__main__"):
                modules.append(module)
    program = (
        "import importlib, sys\n"
        f"heavy = {HEAVY!r}\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except Exception as error:\n"
        "        print(f'{name}: import fails: {type(error).__name__}: {error}')\n"
        "    found = [other for other in heavy if other in sys.modules]\n"
        "    if found:\n"
        "        print(f'{name}: importing it brings in {found}')\n"
        "        heavy = [other for other in heavy if other not in found]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *sorted(modules)], cwd=root, capture_output=True, text=True, timeout=300
    )
    faults = done.stdout.splitlines()
    if done.returncode != 0:
        faults.append(f"importing the package ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return faults


def check_shell(files: list[Path], root: Path) -> list[str]:
    """Shell scripts that bash cannot parse."""
    faults = []
    for path in files:
        if path.suffix == ".sh" or (path.suffix == "" and path.read_bytes()[:32].startswith(b"#!/usr/bin/env bash")):
            done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
            if done.returncode != 0:
                faults.append(f"{path.relative_to(root)}: {done.stderr.strip()}")
    return faults


def check_text(files: list[Path], root: Path) -> list[str]:
    """Blanks after a line-ending backslash, which end a command too early, and paths or hosts of one machine."""
    faults = []
    for path in files:
        if path.suffix not in TEXT_SUFFIXES:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
            place = f"{path.relative_to(root)}:{number}"
            if re.search(r"\\[ \t]+$", line):
                faults.append(f"{place}: blanks after the closing backslash")
            faults += [f"{place}: private text {match[0]!r}" for match in (p.search(line) for p in PRIVATE) if match]
    return faults


def heading_anchors(text: str) -> set[str]:
    """Anchors of the headings of a markdown text, as code hosts make them."""
    headings = re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def check_documents(files: list[Path], root: Path) -> list[str]:
    """Links, project paths and module names in README and docs that lead nowhere."""
    faults = []
    for path in files:
        if path.suffix != ".md":
            continue
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.split("\n"), 1):
            for link in LINK.findall(line):
                if re.match(r"[a-z]+:", link):
                    continue
                file, _, anchor = link.partition("#")
                target = (path.parent / file) if file else path
                if not target.exists():
                    faults.append(f"{name}:{number}: the link {link} leads nowhere")
                elif anchor and target.suffix == ".md" and anchor not in heading_anchors(target.read_text("utf-8")):
                    faults.append(f"{name}:{number}: no heading for the link {link}")
            for mentioned in PROJECT_PATH.findall(line):
                if not (root / mentioned).exists():
                    faults.append(f"{name}:{number}: there is no {mentioned}")
            for mentioned in MODULE.findall(line):
                if not exists_in_package(mentioned, root):
                    faults.append(f"{name}:{number}: there is no {mentioned}")
    return faults


def exists_in_package(dotted: str, root: Path) -> bool:
    """True for a module of the package, or for a name a module defines at its top level (and anything inside it)."""
    parts = dotted.split(".")
    place = root
    for index, part in enumerate(parts):
        if (place / part).is_dir():
            place = place / part
            continue
        source = place / f"{part}.py"
        rest = parts[index + 1 :]
        if not source.exists():
            source, rest = place / "__init__.py", parts[index:]
        if not source.exists():
            return False
        return not rest or rest[0] in top_level_names(source)
    return True


def top_level_names(source: Path) -> set[str]:
    """Names a module defines or imports at its top level, and the texts of its tuples of names (lazy re-exports)."""
    names = set()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
            names |= {inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)}
    return names


def main() -> int:
    """Run all checks over the project."""
    files = tracked_files(ROOT)
    faults = []
    for check in (check_layers, check_shell, check_text, check_documents, check_light_imports):
        faults += check(files, ROOT)
    for fault in faults:
        print(fault)
    print(f"check_tree: {len(files)} files, {len(faults)} faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
