"""Every mutant still applies to the code."""

from tests.mutants.mutants import MUTANTS
from tests.mutants.run import check_applicable


def test_the_code_of_each_mutant_occurs_once() -> None:
    check_applicable(MUTANTS)
