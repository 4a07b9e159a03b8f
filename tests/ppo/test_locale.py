"""Under a locale that knows ASCII only, commands work, files are UTF-8, and what is printed is replaced."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from fastsync.printable import print_what_can_be, printing_what_can_be

ROOT = Path(__file__).parents[2]
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.end_to_end
def test_training_evaluation_and_plot_under_ascii(tmp_path: Path):
    def run(*words: str) -> subprocess.CompletedProcess[bytes]:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONIOENCODING"}
        command = [sys.executable, "-m", "fastsync.cli", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment | ASCII, capture_output=True, timeout=120)

    settings = "# für Tests: ±\ntotal_steps: 200\nnum_envs: 2\nnum_steps: 16\neval_interval: 100\neval_episodes: 1\n"
    (tmp_path / "own.yaml").write_text(settings, encoding="utf-8")
    trained = run("train", "--config", "own.yaml", "--run-name", "mine")
    assert trained.returncode == 0, trained.stderr
    assert b" +- " in trained.stdout
    played = run("eval", "runs/mine", "--episodes", "1")
    assert (played.returncode, b" +- 0.00 over 1 episode" in played.stdout) == (0, True)
    refused = run("train", "--config", "own.yaml", "--run-name", "für")
    assert refused.returncode == 2
    assert b"has letters that this locale has not: it is ascii; set PYTHONUTF8=1" in refused.stderr


def test_characters_that_an_encoding_lacks_are_replaced(monkeypatch: pytest.MonkeyPatch):
    written = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(written, encoding="ascii"))
    with printing_what_can_be():
        print("1 ± 2 → ü \udcff", flush=True)
    assert written.getvalue() == b"1 +- 2 -> ? \xff\n"
    with pytest.raises(UnicodeEncodeError):
        print("ü", flush=True)
    print_what_can_be()
    print("ü", flush=True)
    assert written.getvalue().endswith(b"\n?\n")


def test_every_text_file_is_opened_with_its_encoding():
    """Except for those of fastsync/launch, which are ASCII: of /proc, and templates."""
    files = [*ROOT.glob("fastsync/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    assert len(files) > 100
    for file in files:
        if "launch" not in file.relative_to(ROOT).parts:
            for call in filter(is_text, ast.walk(ast.parse(file.read_text(encoding="utf-8")))):
                assert "encoding" in {each.arg for each in call.keywords}, f"{file}:{call.lineno}"


def is_text(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in ("read_text", "write_text"):
        return True
    modes = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    of_os = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") in ("os", "webbrowser", "self")
    return name == "open" and not of_os and not any("b" in mode for mode in modes[-1:])
