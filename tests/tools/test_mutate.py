"""The list of mutations fits the sources."""

from __future__ import annotations

import pytest

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
