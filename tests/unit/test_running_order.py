"""Which tests run side by side, and which begin first."""

from tests.running_order import in_order, unit_of

ENGINE, PARITY = "tests/engine/test_policy.py", "tests/parity/test_parity.py"
SPARK, UNIT = "tests/spark/test_job.py", "tests/unit/test_wire.py"


def test_a_unit_is_a_file_or_a_folder_whose_files_share_engines() -> None:
    assert unit_of(f"{SPARK}::test_one[a::b]") == SPARK
    assert unit_of(f"{ENGINE}::test_one") == unit_of("tests/engine/test_replicas.py::test_two")
    assert unit_of(f"{ENGINE}::test_one") != unit_of(f"{PARITY}::test_one")


def test_the_longest_units_begin_first_and_tests_within_them_keep_their_order() -> None:
    given = [f"{UNIT}::b", f"{SPARK}::b", f"{PARITY}::b", f"{SPARK}::a", f"{UNIT}::a", f"{PARITY}::a"]
    ordered = [given[index] for index in in_order(given)]
    assert ordered == [
        *(f"{PARITY}::b", f"{PARITY}::a"),
        *(f"{SPARK}::b", f"{SPARK}::a"),
        *(f"{UNIT}::b", f"{UNIT}::a"),
    ]
