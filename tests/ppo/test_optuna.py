"""What the page about Optuna shows is run, where Optuna is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_each_process_of_a_sweep_is_a_trial(tmp_path: Path):
    optuna = pytest.importorskip("optuna")
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    block = re.search(r"^```python\n(.*?)^```$", (ROOT / "docs/guides/sweep.md").read_text(), re.DOTALL | re.MULTILINE)
    assert block
    (tmp_path / "sweep.py").write_text(block[1].replace("=50_000", "=2_000"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "sweep.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert all("learning_rate" in text for text in said)
    study = optuna.load_study(
        study_name="CartPole", storage=JournalStorage(JournalFileBackend(str(tmp_path / "sweep.log")))
    )
    assert sorted(trial.number for trial in study.trials) == [0, 1]
    assert all(trial.value > 5 for trial in study.trials)
    assert {path.name for path in (tmp_path / "runs" / "sweep").iterdir()} == {"0", "1"}
