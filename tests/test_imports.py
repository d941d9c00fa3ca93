"""The dependency graph is a tree: who may import what, and who may see the process's surroundings."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ("placement", "epmoe", "launch")

MAY_IMPORT = {
    "placement": {"numpy", "scipy", "placement"},
    "epmoe": {"torch", "triton", "numpy", "safetensors", "zmq", "msgpack", "epmoe", "placement"},
    "launch": {
        *("numpy", "torch", "zmq", "msgpack", "transformers", "huggingface_hub", "rich"),
        *("epmoe", "placement", "launch"),
    },
}
# (package or file, module): where more is allowed, and whether only inside a function.
SOLVERS = {"ilp.py", "joint.py", "solve.py", "lower_bound.py"}
LAZY_IN_PLACEMENT = {"matplotlib", "rich"}  # report and command line
TORCH_DISTRIBUTED = {"epmoe/comm.py", "launch/torchrun.py"}  # all collectives; the store of a torchrun job
PLACEMENT_FOR_EPMOE = {f"placement.{name}" for name in ("plan", "trace", "cost", "homes", "errors", "__version__")}


def imports(tree: ast.AST) -> list[tuple[str, bool, int]]:
    """(dotted module, inside a function, line) of every import."""
    found = []

    def walk(node: ast.AST, lazy: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, lazy, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"relative import in line {child.lineno}; write the full name"
                names = [f"{child.module}.{a.name}" for a in child.names] if child.module in OURS else [child.module]
                found.extend((name, lazy, child.lineno) for name in names)
            walk(child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    walk(tree, False)
    return found


def faults(path: str, source: str) -> list[str]:
    """What the file at ``path`` (relative to the root) does against the table."""
    package, name = path.split("/")[0], path.split("/")[-1]
    tree = ast.parse(source)
    out = []
    for module, lazy, line in imports(tree):
        if not _may_import(package, name, module, lazy):
            out.append(f"{path}:{line} imports {module}{' lazily' if lazy else ''}")
        if module.startswith("torch.distributed") and path not in TORCH_DISTRIBUTED:
            out.append(f"{path}:{line} imports {module}; only epmoe/comm.py may")
    if package == "launch":
        return out
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            dotted = f"{node.value.id}.{node.attr}"
            if dotted in ("os.environ", "os.getenv", "os.fork", "os.system", "os.popen") or (
                dotted == "sys.argv" and name != "__main__.py"
            ):
                out.append(f"{path}:{node.lineno} uses {dotted}; only launch/ may")
            if dotted == "torch.distributed" and path != "epmoe/comm.py":
                out.append(f"{path}:{node.lineno} uses {dotted}; only epmoe/comm.py may")
    return out


def _may_import(package: str, name: str, module: str, lazy: bool) -> bool:
    top = module.split(".")[0]
    if package == "epmoe" and top == "placement":
        return ".".join(module.split(".")[:2]) in PLACEMENT_FOR_EPMOE
    if package != "launch" and top in ("subprocess", "multiprocessing"):
        return False
    if top in sys.stdlib_module_names or top in MAY_IMPORT[package]:
        return True
    if package == "placement":
        return (
            (top in ("pulp", "highspy") and name in SOLVERS)
            or (top in LAZY_IN_PLACEMENT and lazy)
            or (top == "torch" and lazy and name == "formats_pt.py")
        )
    return path_is_lazy_llm(package, name, top, lazy)


def path_is_lazy_llm(package: str, name: str, top: str, lazy: bool) -> bool:
    """``epmoe.LLM`` resolves from launch on first use, so that ranks never load it."""
    return package == "epmoe" and name == "__init__.py" and top == "launch" and lazy


FILES = sorted(str(p.relative_to(ROOT)) for package in OURS for p in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", FILES)
def test_table(path):
    assert faults(path, (ROOT / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "path, source",
    [
        ("placement/cost.py", "import epmoe"),
        ("placement/cost.py", "import torch"),
        ("placement/cost.py", "import pulp"),
        ("placement/report.py", "import matplotlib.pyplot"),
        ("placement/formats_pt.py", "import torch"),
        ("placement/ilp.py", "import subprocess"),
        ("epmoe/moe/layer.py", "import launch.spawn"),
        ("epmoe/moe/layer.py", "from placement import greedy"),
        ("epmoe/moe/layer.py", "import placement.ilp"),
        ("epmoe/moe/layer.py", "def f():\n    import transformers"),
        ("epmoe/moe/layer.py", "import os\nx = os.environ['A']"),
        ("epmoe/moe/layer.py", "import sys\nx = sys.argv"),
        ("epmoe/moe/exchange.py", "import torch.distributed as dist"),
        ("epmoe/moe/exchange.py", "import torch\ntorch.distributed.barrier()"),
        ("epmoe/__init__.py", "from launch.llm import LLM"),
        ("launch/spawn.py", "import scipy"),
    ],
)
def test_table_can_fail(path, source):
    assert len(faults(path, source)) == 1


def test_a_rank_starts_without_heavy_imports():
    """transformers alone takes seconds to import; it stays in the front process."""
    code = "import sys, launch.rank, epmoe.engine.worker; print(*sorted(m for m in sys.modules if '.' not in m))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"transformers", "tokenizers", "huggingface_hub", "matplotlib", "rich", "pulp", "highspy", "scipy"}
    assert heavy & set(loaded.stdout.split()) == set()
