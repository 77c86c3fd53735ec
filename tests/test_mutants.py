"""`make mutants`: changes are found where behaviour is, drawn by seed, tried one at a time, and told apart by the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tool_files import load_tool

tool: Any = load_tool("mutants")


def changes(source: str) -> set[str]:
    """What mutants make of a line."""
    data = source.encode()
    return {mutant.apply(data).decode() for mutant in tool.mutants_of(data, "m.py")}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", {"x = a <= b"}),
        ("x = (a) >= (b)", {"x = (a) > (b)"}),
        ("x = a is not b", {"x = a is b"}),
        ("x = a not in b", {"x = a in b"}),
        ("x = a < b == c", {"x = a <= b == c", "x = a < b != c"}),
        ("x = a + b", {"x = a - b"}),
        ("x = a // b", {"x = a * b"}),
        ("x = a and b and c", {"x = a or b and c", "x = a and b or c"}),
        ("x = not a", {"x = (a)"}),
        ("x = -a", {"x = (a)"}),
        ("x = 2", {"x = 3", "x = 1"}),
        ("x = 0", {"x = 1"}),
        ("x = 0.5", {"x = 1.5", "x = -0.5"}),
        ("x = 8e9", {"x = 12000000000.0", "x = 4000000000.0"}),
        ("x = True", {"x = False"}),
        ("x = min(a, b)", {"x = max(a, b)"}),
        ("x = np.maximum(a, b)", {"x = np.minimum(a, b)"}),
        ("f(a)", {"pass"}),
        ("a.b = c", {"pass"}),
        ("a[b] += c", {"pass", "a[b] -= c"}),
        ("del a[b]", {"pass"}),
        ("raise E(a + 1)", {"pass"}),
        ("x = a if b else c", {"x = a if (not b) else c"}),
        ("while f(): break", {"while (not f()): break", "while f(): continue"}),
        ("def f(): return a", {"def f(): return None"}),
        ("x = 'é', a < b", {"x = 'é', a <= b"}),
    ],
)
def test_given_a_line_then_these_are_its_mutants(source: str, expected: set[str]) -> None:
    assert changes(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "'''Takes 3 < 4.'''",
        "x: Literal[3]",
        "def f(a: Literal[1]) -> Literal[2]: ...",
        "x = f'{a + 1}'",
        "assert a < 3",
        "x = zip(a, b, strict=True)",
        "if TYPE_CHECKING:\n    x = 1",
        "x = None",
        "x = a",
        "@f(3)\ndef g(): ...",
    ],
)
def test_given_what_is_no_behaviour_then_it_has_no_mutant(source: str) -> None:
    assert changes(source) == set()


def test_given_the_whole_package_then_every_mutant_is_a_program_and_nothing_else_is_changed() -> None:
    mutants = tool.all_mutants(tool.ROOT)
    assert len(mutants) > 5_000
    assert {mutant.path.split("/")[2] for mutant in mutants} >= {"prefix", "scheduling", "tiers", "engine"}
    assert not any("/server/" in mutant.path or "/storage/" in mutant.path for mutant in mutants)
    for mutant in mutants[::97]:
        source = (tool.ROOT / mutant.path).read_bytes()
        changed = mutant.apply(source)
        assert changed != source
        compile(changed, mutant.path, "exec")


def test_given_words_and_lines_then_only_those_are_changed() -> None:
    [line] = {mutant.line for mutant in tool.all_mutants(tool.ROOT, ["pool.py:66"])} or {66}
    assert line == 66
    assert {mutant.path for mutant in tool.all_mutants(tool.ROOT, ["storage/disk.py"])} == {
        "src/kvpool/storage/disk.py"
    }


def test_given_modules_then_the_tests_of_their_packages_and_of_what_they_are_part_of_are_collected() -> None:
    places = tool.places_of(tool.ROOT, ["src/kvpool/scheduling/queues.py", "src/kvpool/pools/pool.py"])
    assert {"tests/scheduling", "tests/pools", "tests/manager", "tests/stateful/test_wild_machine.py"} <= set(places)
    assert not any(place.startswith("tests/tiers") for place in places)
    assert len(places) == len(set(places))
    assert all((tool.ROOT / place).exists() for place in places)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A module of two functions, one of them tested at its edge."""
    (tmp_path / "src" / "small").mkdir(parents=True)
    (tmp_path / "src" / "small" / "__init__.py").touch()
    (tmp_path / "src" / "small" / "ages.py").write_text(
        "def adult(age, limit):\n    return age >= limit\n\n\ndef child(age, limit):\n    return age < limit\n"
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text(
        "from hypothesis import settings\nsettings.register_profile('quick')\n"
    )
    (tmp_path / "tests" / "test_ages.py").write_text(
        "from small.ages import adult, child\n\n"
        "def test_adult():\n    assert [adult(age, 18) for age in (17, 18, 19)] == [False, True, True]\n\n"
        "def test_child():\n    assert child(5, 12)\n"
    )
    return tmp_path


def test_given_a_project_then_what_no_test_notices_survives_and_the_project_stays_as_it_was(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (project / "src" / "small" / "ages.py").read_bytes()
    words = ["--root", str(project), "--processes", "2", "--json", str(project / "out.json")]
    assert tool.main([*words, "--number", "0"]) == 1
    printed = capsys.readouterr().out
    outcomes = json.loads((project / "out.json").read_text())
    assert (project / "src" / "small" / "ages.py").read_bytes() == before
    comparisons = [outcome for outcome in outcomes if outcome["kind"] == "comparison"]
    assert [(outcome["line"], outcome["result"]) for outcome in comparisons] == [(2, "killed"), (6, "survived")]
    killed, survived = comparisons
    assert killed["killer"] == "tests/test_ages.py::test_adult"
    assert (killed["num_tests"], survived["num_tests"]) == (1, 1)  # each meets the tests that call it
    assert survived["diff"] in printed
    assert "4 mutants: 3 killed, 0 timed out, 1 survived; 75 % noticed" in printed


EVERYWHERE = """
LIMIT = 18

def by_constant(age):
    return age >= LIMIT

def by_default(age, limit=18):
    return age >= limit

def by_inner_function(age):
    def limit():
        return 18
    return age >= limit()

class Limit:
    def __init__(self):
        self.age = 18

class Later(Limit):
    def __init__(self):
        super().__init__()

def by_free_variable(age):
    return age >= Later().age
"""


def test_given_a_change_anywhere_in_a_module_then_the_tests_meet_it(project: Path) -> None:
    (project / "src" / "small" / "ages.py").write_text(EVERYWHERE)
    with (project / "tests" / "conftest.py").open("a") as file:
        file.write("\nimport small.ages\n")  # before any test is
    (project / "tests" / "test_ages.py").write_text(
        "import pytest\nfrom small import ages\n\n"
        "@pytest.mark.parametrize('by', ['constant', 'default', 'inner_function', 'free_variable'])\n"
        "def test_adult(by):\n    assert getattr(ages, f'by_{by}')(18)\n"
    )
    mutants = [mutant for mutant in tool.all_mutants(project) if mutant.new in (b"19", b"pass")]
    outcomes = sorted(tool.run_all(project, mutants, processes=2))
    killers = [outcome.killer.removeprefix("tests/test_ages.py::test_adult") for outcome in outcomes]
    assert killers == ["[constant]", "[default]", "[inner_function]", *["[free_variable]"] * 3]


def test_given_a_function_that_no_test_calls_then_its_mutants_meet_the_tests_of_its_module(project: Path) -> None:
    with (project / "src" / "small" / "ages.py").open("a") as file:
        file.write("\n\ndef old(age):\n    return age > 99\n")
        file.write("\n\ndef of_age():\n    return 18\n\n\nOF_AGE = of_age()  # when it is imported\n")
    with (project / "tests" / "test_ages.py").open("a") as file:
        file.write(
            "\ndef test_of_age():\n    from small.ages import OF_AGE\n    assert adult(OF_AGE, 18) and OF_AGE < 19\n"
        )
    mutants = tool.all_mutants(project, ["ages.py:10", "ages.py:14"])
    results = {(o.mutant.line, o.result) for o in tool.run_all(project, mutants, processes=2)}
    assert results == {(10, "survived"), (14, "killed")}


def test_given_mutants_at_the_same_time_then_their_tests_share_no_folder(project: Path) -> None:
    (project / "tests" / "test_ages.py").write_text(
        "from pathlib import Path\nfrom small.ages import child\n\n"
        "def test_child(tmp_path):\n    child(5, 12)\n"
        "    with open(Path(__file__).parent / 'places', 'a') as file:\n        print(tmp_path, file=file)\n"
    )
    outcomes = list(tool.run_all(project, tool.all_mutants(project, ["ages.py:6"]), processes=2))
    assert {outcome.result for outcome in outcomes} == {"survived"}
    places = (project / "tests" / "places").read_text().split()
    assert len(set(places)) == len(places) == len(outcomes) + 1  # and without a mutant


def test_given_quick_tests_elsewhere_then_those_named_like_the_module_and_those_of_its_package_come_first(
    project: Path,
) -> None:
    package, tests = project / "src" / "small" / "people", project / "tests" / "people"
    package.mkdir()
    tests.mkdir()
    (package / "__init__.py").touch()
    (package / "ages.py").write_text("def adult(age):\n    return age >= 18\n")
    test = "from small.people.ages import adult\n\ndef test_adult():\n    assert all(adult(18) for _ in range({}))\n"
    (project / "tests" / "test_rules.py").write_text(test.format(1))
    (tests / "test_people.py").write_text(test.format(5_000))
    [mutant] = [mutant for mutant in tool.all_mutants(project, ["people/"]) if mutant.new == b">"]
    [outcome] = tool.run_all(project, [mutant], processes=1)
    assert (outcome.killer, outcome.num_tests) == ("tests/people/test_people.py::test_adult", 2)
    (tests / "test_ages.py").write_text(test.format(10_000))
    [outcome] = tool.run_all(project, [mutant], processes=1)
    assert (outcome.killer, outcome.num_tests) == ("tests/people/test_ages.py::test_adult", 3)


def test_given_a_function_that_an_import_calls_and_tests_call_what_it_made_then_its_change_is_noticed(
    project: Path,
) -> None:
    (project / "src" / "small" / "made.py").write_text(
        "def least(age):\n    def check(given):\n        return given >= age\n\n    return check\n\nadult = least(18)\n"
    )
    (project / "tests" / "test_made.py").write_text(
        "from small.made import adult\n\ndef test_adult():\n    assert adult(18)\n"
    )
    [mutant] = [mutant for mutant in tool.all_mutants(project, ["made.py:5"]) if mutant.kind == "return value"]
    [outcome] = tool.run_all(project, [mutant], processes=1)
    assert outcome.result == "killed"


def test_given_a_fixture_that_several_tests_share_then_all_of_them_meet_a_change_of_what_it_calls(
    project: Path,
) -> None:
    (project / "tests" / "test_ages.py").write_text(
        "import pytest\nfrom small.ages import adult\n\n"
        "@pytest.fixture(scope='module')\ndef is_adult():\n    return adult(18, 18)\n\n"
        "def test_first(is_adult):\n    pass\n\n"
        "def test_second(is_adult):\n    assert is_adult\n"
    )
    [mutant] = [mutant for mutant in tool.all_mutants(project, ["ages.py:2"]) if mutant.kind == "comparison"]
    [outcome] = tool.run_all(project, [mutant], processes=1)
    assert (outcome.result, outcome.killer, outcome.num_tests) == ("killed", "tests/test_ages.py::test_second", 2)


def test_given_a_seed_then_the_sample_is_the_same_every_time(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = []
    for seed in ("1", "1", "2", "3"):
        assert tool.main(["--root", str(project), "--number", "3", "--seed", seed, "--list"]) == 0
        samples.append(capsys.readouterr().out.partition("\n")[2])
    assert samples[0] == samples[1]
    assert len(set(samples)) > 1


def test_given_tests_that_fail_already_then_the_others_tell_mutants_apart(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (project / "tests" / "test_ages.py").open("a") as file:
        file.write("\ndef test_broken():\n    assert False\n")
    (project / "tests" / "test_ages_of_others.py").write_text("import a_package_that_is_not_installed\n")
    assert tool.main(["--root", str(project), "--module", "ages.py:2", "--processes", "1"]) == 0
    printed = capsys.readouterr().out
    assert "fails or takes too long: tests/test_ages.py::test_broken\n" in printed
    assert "fails or takes too long: tests/test_ages_of_others.py\n" in printed
    assert "2 mutants: 2 killed, 0 timed out, 0 survived; 100 % noticed" in printed


def test_given_no_test_that_passes_then_no_mutant_is_tried(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "tests" / "test_ages.py").write_text("import a_package_that_is_not_installed\n")
    assert tool.main(["--root", str(project), "--number", "1", "--processes", "1"]) == 2
    assert "without a mutant no test passes" in capsys.readouterr().err


def test_given_a_mutant_that_never_ends_then_it_counts_as_noticed(project: Path) -> None:
    (project / "src" / "small" / "ages.py").write_text(
        "def spent(years):\n    while years:\n        years -= 1\n    return years\n"
    )
    (project / "tests" / "test_ages.py").write_text(
        "from small.ages import spent\n\ndef test_spent():\n    assert spent(3) == 0\n"
    )
    [endless] = [mutant for mutant in tool.all_mutants(project) if mutant.new == b"pass"]
    [outcome] = tool.run_all(project, [endless], processes=1, limit=3)
    assert (outcome.result, outcome.killer) == ("timed out", "")


def test_given_no_more_minutes_then_no_mutant_is_begun(project: Path) -> None:
    assert list(tool.run_all(project, tool.all_mutants(project), processes=1, minutes=0)) == []


def test_given_a_file_for_measurements_then_tests_are_measured_once_in_the_same_tree(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = project / "kept.json"
    words = ["--root", str(project), "--module", "ages.py:2", "--processes", "1", "--measured", str(kept)]
    with (project / "tests" / "test_ages.py").open("a") as file:
        file.write("\ndef test_broken():\n    assert False\n")

    def said() -> str:
        assert tool.main(words) == 0
        printed = capsys.readouterr().out
        assert "fails or takes too long: tests/test_ages.py::test_broken\n" in printed
        assert "2 mutants: 2 killed, 0 timed out, 0 survived; 100 % noticed" in printed
        return printed

    said()
    found = json.loads(kept.read_text())
    [(_, usual)] = found["files"].values()
    assert usual["tests/test_ages.py::test_broken"][1] is False
    usual["tests/test_ages.py::test_adult"][0] = 777.0
    kept.write_text(json.dumps(found))
    assert "2 tests take 777 s" in said()
    with (project / "src" / "small" / "ages.py").open("a") as source:
        source.write("\n\ndef old():\n    return 99\n")
    assert "2 tests take 777 s" not in said()
