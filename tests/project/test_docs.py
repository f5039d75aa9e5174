"""The README, the other pages beside it, the pages of docs/ and the records of tests/: every block
runs, every link has a target.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.support import processes
from tests.support.commands import ENVIRONMENT
from tests.support.needs import program
from tests.support.pages import Block, blocks, printed_blocks, python_blocks, run_blocks
from tests.support.source import ROOT, own_functions, python_files, tree

PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md")]
)
# The maximum number of blocks, over all pages, that start with `# not run: reason`.
MOST_NOT_RUN = 3

DOCS = ROOT / "docs"
START = [
    ROOT / "README.md",
    DOCS / "index.md",
    DOCS / "guides" / "recipes.md",
    *sorted((DOCS / "start").glob("*.md")),
]
"""The pages whose blocks are programs."""
PROGRAMS = [
    pytest.param(page, block, id=f"{page.name}:{block.line}")
    for page in START
    for block in python_blocks(page)
]


def each_of(pages: list[Path]) -> pytest.MarkDecorator:
    """Run a test for each page."""
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


pages = each_of(PAGES)


@each_of([page for page in PAGES if page not in START])
def test_every_python_block_runs(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The Python blocks of a page run in order, share their names, and print what the page says;
    "..." is any text.

    Files are written to a temporary directory.
    """
    monkeypatch.chdir(tmp_path)
    run_blocks(page, [block for block in python_blocks(page) if not block.reason_not_run], capsys)
    errors = [
        record.getMessage()
        for record in caplog.records
        if record.name == "asyncio" and record.levelno >= 40
    ]
    assert not errors


@pytest.mark.parametrize(("page", "block"), PROGRAMS)
def test_a_block_of_the_start_is_a_program(page: Path, block: Block, tmp_path: Path) -> None:
    """Saved alone as a file and run in a process of its own, it prints what the page says, and
    nothing that is a warning.
    """
    for package in re.findall(r"^(?:import|from) (\w+)", block.text, re.MULTILINE):
        importlib.import_module(package)  # one that is missing leaves the program out
    file = tmp_path / "program.py"
    file.write_text(block.text, encoding="utf-8")
    command = [sys.executable, "-W", "error", str(file)]
    done = processes.run(command, cwd=tmp_path, env=ENVIRONMENT)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done
    assert done.stdout == printed_blocks(page)[block.line]


def test_type_checkers_accept_the_programs_of_the_start(tmp_path: Path) -> None:
    """No program has a fault that mypy finds, with or without annotations."""
    for page in START:
        for block in python_blocks(page):
            name = f"{page.stem}_{block.line}.py".replace("-", "_").lower()
            (tmp_path / name).write_text(block.text, encoding="utf-8")
    done = processes.run(
        [sys.executable, "-m", "mypy", "--check-untyped-defs", "--cache-dir", "cache", "."],
        cwd=tmp_path,
        env={**ENVIRONMENT, "MYPYPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout


def test_few_blocks_are_not_run() -> None:
    """A block that is not run gives a reason, and there are few such blocks."""
    reasons = [
        f"{page.name}:{block.line}: {block.reason_not_run}"
        for page in PAGES
        for block in python_blocks(page)
        if block.reason_not_run is not None
    ]
    assert len(reasons) <= MOST_NOT_RUN, "\n".join(reasons)


@pages
def test_every_block_names_its_language(page: Path) -> None:
    """Each block names one of the known languages; a block without one would not be checked."""
    assert {block.language for block in blocks(page)} <= {
        "python",
        "sh",
        "text",
        "toml",
        "yaml",
        "json",
    }
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"^ *```", text, flags=re.MULTILINE)) == 2 * len(list(blocks(page)))


def test_every_kubernetes_manifest_is_valid() -> None:
    """A block of YAML is a manifest that the API of Kubernetes accepts, with no field that it does
    not know.
    """
    import kubernetes_validate

    manifests = [
        yaml.safe_load(block.text)
        for page in PAGES
        for block in blocks(page)
        if block.language == "yaml"
    ]
    assert manifests
    for manifest in manifests:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@pages
def test_shellcheck_accepts_every_shell_block(page: Path, tmp_path: Path) -> None:
    """Also the scripts for Slurm and the commands that are only shown."""
    scripts: list[Path] = []
    for block in blocks(page):
        if block.language == "sh":
            scripts.append(tmp_path / f"line_{block.line}.sh")
            scripts[-1].write_text(block.text, encoding="utf-8")
    if scripts:
        found = processes.run([program("shellcheck"), "--shell=bash", *map(str, scripts)])
        assert found.returncode == 0, found.stdout


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as common Markdown viewers derive them."""
    text = re.sub(
        r"^( *)```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    titles = re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pages
def test_every_relative_link_has_a_target(page: Path) -> None:
    """Files and headings that relative links name exist in the repository."""
    prose = re.sub(
        r"^( *)```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    wrong: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if (
            not file.exists()
            or not file.is_relative_to(ROOT)
            or (anchor and anchor not in anchors(file))
        ):
            wrong.append(target)
    assert not wrong


@pages
def test_every_named_test_exists(page: Path) -> None:
    """Where a page names a file of tests, or a test in it, it is there."""
    named = re.findall(
        r"`(?:tests/)?([a-z_]+/test_\w+\.py)(?:::(\w+))?`", page.read_text(encoding="utf-8")
    )
    files = {file: ROOT / "tests" / file for file, _ in named}
    texts = {
        file: path.read_text(encoding="utf-8") if path.exists() else ""
        for file, path in files.items()
    }
    assert not [(file, test) for file, test in named if f"def {test}" not in texts[file]]


def failures(page: Path) -> list[str]:
    """Return the headings of a page and the first cells of its tables, without links."""
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", page.read_text(encoding="utf-8"))
    return re.findall(r"^(?:## .+|\| (?!failure \|)[^|]+)", text, flags=re.MULTILINE)


def test_each_failure_has_its_tests() -> None:
    """FAILURE_TESTS.md names tests for each failure of the page, in the order of the page."""
    record = ROOT / "tests" / "project" / "FAILURE_TESTS.md"
    rows = failures(DOCS / "explanations" / "what-happens-when.md")
    assert len(rows) > 40
    assert failures(record) == rows
    assert [
        line
        for line in record.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and not line.endswith("` |") and line != "| failure | tests |"
    ] == []


def test_the_architecture_page_names_what_exists() -> None:
    """Each row of the page with a file and a function names one that the library has, so that the
    page stays true.
    """
    text = (ROOT / "docs" / "design" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+\.py)` \| `(\w+)` \|", text, flags=re.MULTILINE)
    wrong = [
        f"{file}: {function}"
        for file, function in rows
        if not (path := ROOT / "aiohooks" / file).exists()
        or function not in {name.rpartition(".")[2] for name, _ in own_functions(tree(path).body)}
    ]
    assert rows
    assert not wrong


FOR_DEVELOPERS = [
    page
    for page in PAGES
    if page.name in ("CONTRIBUTING.md", "architecture.md") or page.parent.name == "decisions"
]


@pytest.mark.parametrize("page", FOR_DEVELOPERS, ids=lambda page: page.name)
def test_pages_for_developers_name_files_that_exist(page: Path) -> None:
    """A path to a Python file in these pages is relative to the repository or to the library, and
    the file exists.
    """
    named = re.findall(r"`([\w/]+/[\w/]*\.py)`", page.read_text(encoding="utf-8"))
    assert [
        path
        for path in named
        if not (ROOT / path).exists() and not (ROOT / "aiohooks" / path).exists()
    ] == []


@pytest.mark.parametrize(("heading", "needs"), [("Run it", "examples/"), ("Test it", "-m pytest")])
def test_the_readme_has_one_command(heading: str, needs: str) -> None:
    """The sections "Run it" and "Test it" have one command each, with an environment of its own; CI
    runs both.
    """
    done = processes.run_python(".ci/readme_command", heading)
    (command,) = done.stdout.splitlines()
    assert command.startswith("python3 -m venv ")
    assert "pip install" in command
    assert needs in command
    assert f'"{heading}"' in (ROOT / ".ci" / "noxfile.py").read_text(encoding="utf-8")


# Modules that an example imports are run by it.
PARTS = {"__init__.py", "train_digits_processes.py"}
EXAMPLES = [
    path
    for path in python_files("examples")
    if path.parent.name == "examples" and path.name not in PARTS
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_run_by_a_test(example: Path) -> None:
    """Each example is run by tests/integration/test_examples.py or has its own test file, there or
    with TensorFlow.
    """
    folders = (ROOT / "tests" / "integration", ROOT / "tests" / "adapters" / "tensorflow")
    tests = "".join(
        path.read_text(encoding="utf-8")
        for folder in folders
        for path in folder.glob("test_example*.py")
    )
    assert re.search(rf'["/]{re.escape(example.name)}"', tests)
