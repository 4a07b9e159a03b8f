"""The plan of what is measured again: each command can be read, and what is there is not measured twice."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.tools.test_docs_code import python_command
from tools import measure
from tools.measure import PLAN, Measurement, main


def test_what_is_there_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit, ran = ["abc"], list[list[str]]()

    def run(words: list[str], **_: object) -> CompletedProcess[str]:
        ran.append(words)
        Path(words[-1]).write_text("[]")
        return CompletedProcess(words, 1 if "ppo" in words and "--until" not in words else 0)

    monkeypatch.setattr(measure, "environment", lambda _: {"commit": commit[0]})
    monkeypatch.setattr("subprocess.run", run)
    assert main([str(tmp_path), "--only", "sync"]) == 0
    of_sync = [each.theme for each in PLAN if each.theme.startswith("sync")]
    assert [Path(words[-1]).stem for words in ran] == of_sync
    ran.clear()
    assert main([str(tmp_path)]) == 1  # what fails is tried again, and what resumes goes on
    once = {Path(words[-1]).stem for words in ran}
    assert once == {each.theme for each in PLAN} - {*of_sync}
    ran.clear()
    assert main([str(tmp_path)]) == 1
    assert {Path(words[-1]).stem for words in ran} == {each.theme for each in PLAN if each.command.startswith("ppo")}
    commit[0] = "abc-dirty"
    assert main([str(tmp_path)]) == 2
    assert "commit what has changed first" in capsys.readouterr().err


@pytest.mark.parametrize("each", PLAN, ids=lambda each: each.theme)
def test_each_command_of_the_plan_can_be_read(each: Measurement, tmp_path: Path) -> None:
    python_command(["-m", "benchmarks", *each.words, str(tmp_path / "rows.json")])
