"""The script for those who trust no harness: it is short, stands alone, checks what it measures, and runs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/standalone.py"
METHODS = {
    "DDP",
    "DDP with fastsync's hook, full width",
    "attach, full width",
    "attach, fp16",
    "attach, int8 with error feedback",
}


def run(script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script), *words]
    return subprocess.run(command, cwd=SCRIPT.parents[1], capture_output=True, text=True, timeout=150, check=False)


def test_it_is_read_in_a_minute_and_imports_nothing_else_of_ours():
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 80
    nodes = list(ast.walk(ast.parse(text)))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    assert {module.split(".")[0] for module in modules} - sys.stdlib_module_names == {"torch", "fastsync"}


@pytest.mark.end_to_end
def test_it_prints_the_table_of_this_machine():
    ended = run(SCRIPT, "--numel", "50000", "--steps", "3")
    assert ended.returncode == 0, ended.stderr
    title, _, headings, _, *rows = ended.stdout.splitlines()
    assert title.startswith("49,920 float32 parameters, 2 ranks, ")
    assert headings == "| | step in ms, median | 10 to 90 % of steps | DDP's time ÷ this |"
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert {name for name, *_ in cells} == METHODS
    assert cells[0][0] == "DDP"
    assert cells[0][3] == "1.00"


@pytest.mark.slow
@pytest.mark.end_to_end
def test_a_wrong_result_is_no_result(tmp_path: Path):
    """Where nothing may be lost, fp16 is wrong."""
    strict = tmp_path / "strict.py"
    strict.write_text(SCRIPT.read_text().replace('("fp16", 2**-9)', '("fp16", 0.0)'))
    ended = run(strict, "--numel", "50000", "--steps", "3")
    assert ended.returncode != 0
    assert "attach, fp16 is WRONG: a value is " in ended.stderr
    assert ended.stdout == ""


@pytest.mark.end_to_end
def test_without_torchrun_it_says_how_to_start_it():
    command = [sys.executable, str(SCRIPT)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == 2
    assert "start it by torchrun --nproc-per-node=2 benchmarks/standalone.py" in ended.stderr
