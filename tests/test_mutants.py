"""The table of `make mutants` is up to date, and the script tells a mutant that is noticed from one that is not."""

import mutants
import pytest

ITEMS = ("cache/test_hashing.py::test_an_item_is_in_the_blocks_that_hold_its_tokens_and_in_no_other",)
NOTICED = mutants.Mutant("noticed", "item.start < hi", "item.start <= hi", ITEMS)
UNNOTICED = mutants.Mutant("unnoticed", "Items with a token in the block", "Items", ITEMS)


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_its_text_stands_once_and_its_tests_exist(mutant):
    path, _ = mutants.place(mutant)
    assert mutant.old != mutant.new
    if path.suffix == ".py":
        compile(path.read_text(encoding="utf-8").replace(mutant.old, mutant.new), path, "exec")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name}" in (mutants.ROOT / "tests" / file).read_text(encoding="utf-8")


def test_names_are_those_of_one_mutant_each():
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("text", ["def ", "no such text stands anywhere"])
def test_a_text_that_does_not_stand_once_is_refused(text):
    with pytest.raises(ValueError, match=r"mutant 'x': .* must stand once, it stands "):
        mutants.place(mutants.Mutant("x", text, "", ()))


@pytest.mark.slow
def test_the_script_tells_who_survived(capsys):
    assert mutants.main([NOTICED, UNNOTICED]) == 1
    noticed, unnoticed, total = capsys.readouterr().out.splitlines()
    assert noticed.startswith("killed ") and unnoticed.startswith("SURVIVED ")
    assert total == "1 of 2 killed"
