"""The pages on how it works name files, classes and methods as they are, and the site lists every page."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "kvpool"
PAGES = [ROOT / "docs" / name for name in ("architecture.md", "blocks.md", "threads.md")]


def words_of(page: Path) -> set[str]:
    """What stands between backticks, outside of drawings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`([^`\n]+)`", text))


def members(body: list[ast.stmt]) -> set[str]:
    """Methods and plain attributes of a class."""
    found = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@functools.cache
def names_in_the_source() -> set[str]:
    """`Class` and `Class.member` for every class of the package, inherited members included."""
    classes = {
        node.name: node
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "compat"  # names of earlier systems, some of which are ours as well
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    names = set(classes)
    for name in classes:
        lineage = [name]
        for ancestor in lineage:
            names |= {f"{name}.{member}" for member in members(classes[ancestor].body)}
            bases = (base.id for base in classes[ancestor].bases if isinstance(base, ast.Name))
            lineage += [base for base in bases if base in classes]
    return names


def test_given_the_architecture_page_then_every_file_it_names_exists_and_none_is_left_out() -> None:
    files = {word for word in words_of(ROOT / "docs" / "architecture.md") if re.fullmatch(r"[a-z_/]+(\.py|/)", word)}
    files.discard("src/kvpool/")
    assert [name for name in sorted(files) if not ((PACKAGE / name).exists() or (ROOT / name).exists())] == []
    modules = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    folders = tuple(name for name in files if name.endswith("/"))
    assert sorted(name for name in modules - files if not name.startswith(folders)) == []


def test_given_the_pages_on_how_it_works_then_every_class_and_method_they_name_exists() -> None:
    words = set().union(*map(words_of, PAGES))
    named = {word for word in words if re.fullmatch(r"[A-Z][a-z]\w+(\.\w+)?|KVCache\w+(\.\w+)?", word)}
    assert len(named) > 40
    assert sorted(named - names_in_the_source()) == []


def test_given_the_path_of_a_request_then_each_step_names_the_file_of_its_classes() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\| \d\. [^|]+\| [^|]+\| ([^|]+) \| ([^|]+) \|", page, re.MULTILINE)
    assert len(steps) == 7
    for calls, files in steps:
        source = "".join((PACKAGE / name).read_text(encoding="utf-8") for name in re.findall(r"`([^`]+)`", files))
        named = re.findall(r"`(\w+)\.(\w+)`", calls)
        assert [name for name, verb in named if f"class {name}" not in source or f"def {verb}(" not in source] == []


def test_given_the_pictures_of_the_layers_then_every_class_in_them_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    pictures = "\n".join(re.findall(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    named = set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w+(?:\.\w+)?|\bKVCache\w+", pictures)) - {
        "FlashInfer",
        "OpenAI",
        "ZeroMQ",
    }
    assert len(named) > 25
    assert sorted(named - names_in_the_source()) == []


def test_given_the_glossary_then_it_is_sorted_and_the_code_uses_each_of_its_words() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([a-z ]+) \| [A-Z]", page.partition("## Glossary")[2], re.MULTILINE)
    assert 15 < len(words) < 25, "a stranger learns about twenty words, not more"
    assert words == sorted(words)
    code = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")).lower()
    assert [word for word in words if not re.search(rf"\b{word.replace(' ', '[ _]')}|_{word}", code)] == []


def test_given_any_page_then_every_dotted_name_of_the_package_exists() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"(?<![\w/.-])kvpool((?:\.[A-Za-z_]\w*)+)", text))
    named -= {".toml", ".service", ".yaml", ".json", ".txt"}  # files of operators
    assert len(named) > 40
    assert sorted(name for name in named if not is_there(name.split(".")[1:])) == []


def test_given_any_page_then_every_file_of_the_repository_that_it_names_exists() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"(?<![\w/-])(?:tests|benchmarks|examples|tools|deploy|kvpool)/[\w/-]+\.\w+", text))
    assert len(named) > 40
    assert sorted(name for name in named if not ((ROOT / name).exists() or (ROOT / "src" / name).exists())) == []


def is_there(parts: list[str]) -> bool:
    """Whether a dotted name leads through folders and modules to a word of the last one."""
    path = PACKAGE
    while parts and ((path / parts[0]).is_dir() or (path / f"{parts[0]}.py").exists()):
        path, parts = (path / parts[0] if (path / parts[0]).is_dir() else path / f"{parts[0]}.py"), parts[1:]
    source = (path / "__init__.py" if path.is_dir() else path).read_text(encoding="utf-8")
    return not parts or re.search(rf"\b{parts[0]}\b", source) is not None


def test_given_the_lengths_of_a_row_then_the_page_explains_each() -> None:
    page = (ROOT / "docs" / "blocks.md").read_text(encoding="utf-8").partition("## Lengths")[2].partition("\n## ")[0]
    explained = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    source = (PACKAGE / "core" / "rows.py").read_text(encoding="utf-8")
    assert explained == set(re.findall(r"self\.(\w+): Int64Array = np\.zeros\(num_rows,", source))


def test_given_the_site_then_it_lists_every_page() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert listed == pages


def test_given_the_numbers_of_the_readme_then_the_benchmark_pages_have_them() -> None:
    why = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Why")[2].partition("\n## ")[0]
    measured = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "benchmarks" / "figures").glob("*.md"))
    numbers = re.findall(r"\| \*\*([\d.]+)×\*\* \|", why)
    assert len(numbers) == 3
    assert [number for number in numbers if not re.search(rf"(?<![\d.]){re.escape(number)}(\.\d)?×", measured)] == []


def test_given_a_sentence_on_how_to_install_then_it_works_from_a_checkout() -> None:
    """kvpool is on no package index, so `pip install 'kvpool[hf]'` finds nothing."""
    texts = [*PACKAGE.rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    by_name = re.compile(r"pip install '?kvpool\b")
    assert [str(path) for path in texts if by_name.search(path.read_text(encoding="utf-8"))] == []
