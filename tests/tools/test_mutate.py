"""The list of mutations fits the sources."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import mutate
from tools.mutate import ROOT, Mutation, load

MUTATIONS = list(load())
assert len(MUTATIONS) > 50


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.file)
def test_a_mutation_has_one_place_in_its_file_and_tests_that_exist(mutation: Mutation):
    mutation.apply()
    assert mutation.text != mutation.becomes
    assert mutation.breaks
    assert mutation.tests
    assert all((ROOT / test).is_file() for test in mutation.tests)


def test_what_has_no_place_in_its_file_or_more_than_one_is_named():
    with pytest.raises(ValueError, match=r"bucket.cpp: no such text .* 0 times"):
        Mutation("bucket.cpp", "no such text", "", "an example", ()).apply()


def test_tests_that_tell_of_what_a_mistake_breaks_come_first():
    (mutation,) = (each for each in MUTATIONS if each.breaks == "rows are written while others read them")
    first = mutation.likely_tests[0]
    assert first == "tests/engine/test_shared_memory.py::test_no_row_is_read_too_early_or_written_too_soon"


def test_commands_run_in_the_tree_of_mutants_and_import_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mutate, "TREE", tmp_path)
    monkeypatch.setattr(mutate, "LOG", tmp_path / "command.log")
    shown = "import os; print(os.getcwd(), os.environ['PYTHONPATH'].split(':')[0])"
    assert mutate.run((sys.executable, "-c", shown), 60)[0] == 0
    assert f"{tmp_path} {tmp_path}\n" in mutate.LOG.read_text()


def test_the_tree_of_mutants_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    monkeypatch.setattr(mutate, "TREE", tmp_path / "build/tree")
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "A")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "a@b.c")
    mutate.git("init", "--quiet")
    for text, is_committed in (("first", True), ("second", True), ("third", False)):
        (tmp_path / "source").write_text(text)
        mutate.git("add", "source")
        if is_committed:
            mutate.git("commit", "--quiet", "-m", text)
        mutate.check_out()
        assert (mutate.TREE / "source").read_text() == text
