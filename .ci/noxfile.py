"""The sessions of CI: `nox -f .ci/noxfile.py --list` names them, and `-s static` runs one.

`.ci/run` runs them all on this machine, some at the same time, and GitHub runs each on a machine of
its own. Arguments after `--` go to pytest.

nox makes no environment: most sessions share that of `environment`, and the others need what a new
user has, or a Python that nox cannot find.
"""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile

import nox

nox.options.default_venv_backend = "none"
ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = pathlib.Path(os.environ.get("CI_FOLDER") or tempfile.mkdtemp(prefix="aiohooks-ci-"))
"""The folder of what the sessions make."""
TOOLS = ROOT / ".venv" / "bin"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
FAST = ("-m", "not slow", "--loop", "asyncio")
SITE_PACKAGES = 'import sysconfig; print(sysconfig.get_path("purelib"))'
PYTHONS = ["3.11", "3.12", "3.13", "3.14", "3.15"]
LEFT_OUT = 69
"""The exit status of a script that cannot have its Python here; it says why."""

FRAMEWORKS = {
    "composed": [
        "openai-agents>=0.20",
        "langchain-core>=1.0",
        "pydantic-ai-slim>=2.0",
        "fastmcp>=4.1.2",
        "google-adk>=2.13",
        "agent-framework-core>=1.23",
        "haystack-ai>=3.4",
        "taskiq>=0.13",
        "procrastinate>=3.10",
        "litestar>=2.25",
        "httpx>=0.28",
        "aiohttp>=3.14",
        "strawberry-graphql>=0.341",
        "aiogram>=3.31",
    ],
    "services": [
        "prefect>=3.9",
        "quart>=0.22",
        "sanic>=25.12",
        "discord.py>=2.7",
        "hikari>=2.7",
        "scrapy>=2.19",
        "textual>=8.2",
        "python-telegram-bot>=22.8",
        "aiohttp>=3.14",
        "aio-pika>=10.2",
        "httpx>=0.28",
    ],
    "assistants": [
        "strands-agents>=1.62",
        "semantic-kernel>=1.45",
        "autogen-agentchat>=0.7.5",
        "dspy>=3.4",
        "pipecat-ai>=1.14",
        "temporalio>=1.35",
    ],
    "tensorflow": ["tensorflow-cpu>=2.21"],
}
"""Packages that decide about the versions of much else, so that each family has an environment."""
FRAMEWORK_TESTS = {
    "composed": ["tests/frameworks/families"],
    # Some of them use what their own dependencies deprecate.
    "services": ["-W", "ignore::DeprecationWarning", "tests/frameworks/services"],
    "assistants": ["-W", "ignore::DeprecationWarning", "tests/frameworks/assistants"],
    "tensorflow": ["tests/adapters/tensorflow"],
}


def run(
    session: nox.Session, *command: str | os.PathLike[str], statuses: tuple[int, ...] = (0,)
) -> None:
    """Run a command in the checkout; it fails with another exit status than these."""
    session.chdir(ROOT)
    session.run(*command, external=True, success_codes=statuses)


@nox.session
def environment(session: nox.Session) -> None:
    """Make `.venv`, the environment of most sessions."""
    run(session, ".ci/environment", "python3", ".venv", "test-all", "docs")


@nox.session
def programs(session: nox.Session) -> None:
    """Install the programs that tests need and that come as no wheel."""
    run(session, ".ci/system_packages")


@nox.session
@nox.parametrize("heading", ["Run it", "Test it"], ids=["run", "test"])
def new_user(session: nox.Session, heading: str) -> None:
    """Run a command of README.md as a new user does."""
    run(session, ".ci/as_new_user", heading, FOLDER / heading.split()[0].lower())


@nox.session
def static(session: nox.Session) -> None:
    """Check style and types, and that the types of the installed library are complete."""
    python = TOOLS / "python"
    pyright = TOOLS / "pyright"
    run(session, TOOLS / "ruff", "check", ".")
    run(session, TOOLS / "ruff", "format", "--check", ".")
    run(session, TOOLS / "mypy")
    run(session, pyright, "--pythonpath", python)
    report = FOLDER / "types.json"
    # From another folder, so that pyright does not take the checkout for the installed library.
    # There it finds the Python on PATH only.
    session.chdir(FOLDER)
    with report.open("w", encoding="utf-8") as file:
        session.run(
            *(pyright, "--verifytypes", "aiohooks", "--ignoreexternal", "--outputjson"),
            external=True,
            stdout=file,
            success_codes=[0, 1],  # `type_completeness` reads what is wrong
            env={"PATH": f"{TOOLS}:{os.environ['PATH']}"},
        )
    run(session, python, ".ci/type_completeness", report)


@nox.session
def site(session: nox.Session) -> None:
    """Build the site, and check its pages."""
    run(session, TOOLS / "python", "-m", "docs.site.build", FOLDER / "site")


@nox.session
def packages(session: nox.Session) -> None:
    """Build and check the sdist and the wheel, and use the wheel alone on each Python."""
    run(session, ".ci/packages")


@nox.session
@nox.parametrize("version", PYTHONS, ids=PYTHONS)
def python(session: nox.Session, version: str) -> None:
    """Run the tests of what differs between versions of Python."""
    if version == "{}.{}".format(*sys.version_info):
        session.skip("the other sessions run on this Python")
    folder = FOLDER / f"python{version}"
    command = (".ci/on_python", version, ".ci/test_on_python", folder, *session.posargs)
    run(session, *command, statuses=(0, LEFT_OUT))


@nox.session
@nox.parametrize("family", list(FRAMEWORKS), ids=list(FRAMEWORKS))
def frameworks(session: nox.Session, family: str) -> None:
    """Run the tests with a family of frameworks."""
    folder = FOLDER / family
    python = folder / "bin" / "python"
    run(session, "python3", "-m", "venv", folder)
    pip = (python, "-m", "pip", "install", "-q", "--no-compile", ".")
    if family == "tensorflow":
        # What the environment of the other tests has is there too. Where another version is wanted,
        # that comes first.
        shared = session.run(TOOLS / "python", "-c", SITE_PACKAGES, silent=True, external=True)
        own = session.run(python, "-c", SITE_PACKAGES, silent=True, external=True)
        pathlib.Path(own.strip(), "current.pth").write_text(shared, encoding="utf-8")
        run(session, *pip, *FRAMEWORKS[family])
        run(session, python, *PYTEST, *FRAMEWORK_TESTS[family])
        return
    run(session, *pip, "pytest>=8.4", "pytest-asyncio>=1.5", *FRAMEWORKS[family])
    run(session, python, *PYTEST, "--loop", "asyncio", *FRAMEWORK_TESTS[family])


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests; none may be left out."""
    arguments = ("-n", "2", "--dist", "loadfile", "--nothing-missing", *session.posargs)
    # With no tool of the environment on PATH: what a test needs of it must be found.
    run(session, TOOLS / "python", *PYTEST, *arguments)


@nox.session
def disk(session: nox.Session) -> None:
    """Run the fast tests of checkpoints with a slow disk."""
    slow_disk = ("-n", "3", "--slow-disk", "0.15", "--shuffle", "1")
    run(
        session,
        TOOLS / "python",
        *(*PYTEST, *FAST, *slow_disk, *session.posargs, "tests/checkpoint"),
    )


@nox.session
def busy(session: nox.Session) -> None:
    """Run the fast tests of graphs beside processes that keep the cores busy eight times over."""
    python = TOOLS / "python"
    run(session, python, "-m", "tests.support.busy", "--", python, *PYTEST, *FAST, "tests/graph")
