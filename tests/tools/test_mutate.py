"""The list of mutations fits the sources."""

from __future__ import annotations

import pytest

from tools.mutate import ROOT, Mutation, load

MUTATIONS, TESTS = load()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.file)
def test_a_mutation_has_one_place_in_its_file(mutation: Mutation):
    mutation.apply()
    assert mutation.text != mutation.becomes


def test_every_file_has_tests_that_exist():
    assert {mutation.file for mutation in MUTATIONS} <= TESTS.keys()
    assert all((ROOT / test).is_file() for tests in TESTS.values() for test in tests)


def test_what_has_no_place_in_its_file_or_more_than_one_is_named():
    with pytest.raises(ValueError, match=r"bucket.cpp: no such text .* 0 times"):
        Mutation("bucket.cpp", "no such text", "", "an example").apply()
    with pytest.raises(ValueError, match=r"csrc has 0 files of that name"):
        Mutation("no_such_file.cpp", "", "", "an example").apply()
