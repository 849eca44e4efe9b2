"""Every mutant still applies to the code."""

import pytest

from tests.mutants.mutants import MUTANTS, Mutant
from tests.mutants.run import ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=[x.name for x in MUTANTS])
def test_the_code_of_a_mutant_occurs_once(mutant: Mutant) -> None:
    assert (ROOT / mutant.path).read_text("utf-8").count(mutant.old) == 1
