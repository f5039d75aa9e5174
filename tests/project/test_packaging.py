"""What the built packages say of themselves, their extras, and how they are released."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import aiohooks as ah
from tests.support import smoke
from tests.support.needs import need, program
from tests.support.processes import run, run_python
from tests.support.source import ROOT
from tests.support.versions import (
    CORE,
    LARGE,
    PROJECT,
    SEVERAL,
    extra_of_the_day,
    floor_of,
    requirements,
    requirements_of_extra,
)

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

# Their tests use the newest versions too, and need a server, or a minute.
TESTED_ELSEWHERE = {"redis", "ray", "tensorflow"}


def test_the_version_is_in_one_place() -> None:
    """`aiohooks.__version__` is what is built, and what the command says."""
    assert "version" in PROJECT["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", ah.__version__)
    said = run_python("-m", "aiohooks", "--version")
    assert said.stdout == f"aiohooks {ah.__version__}\n"


def test_only_what_is_tested_is_claimed() -> None:
    """The classifiers name the versions of Python that CI tests, and the one system and
    framework.
    """
    names = {
        name.removeprefix("Programming Language :: Python :: ") for name in PROJECT["classifiers"]
    }
    tested = {
        "3.11",
        *re.findall(r"3\.\d+", (ROOT / ".ci" / "run").read_text(encoding="utf-8")),
    }
    assert {name for name in names if re.fullmatch(r"3\.\d+", name)} == tested
    kinds = ("Operating System", "Framework")
    assert [name for name in PROJECT["classifiers"] if name.startswith(kinds)] == [
        "Framework :: AsyncIO",
        "Operating System :: POSIX :: Linux",
    ]


def test_each_extra_has_its_day() -> None:
    """CI installs each extra but the large ones alone, on the other Pythons, one after the other
    day.
    """
    small = set(requirements()) - set(LARGE)
    assert set(LARGE) < set(requirements())
    assert {extra_of_the_day(day) for day in range(len(small))} == small


def test_every_extra_has_a_program() -> None:
    """`python -m tests.support.versions` tries each extra with a program, at a floor for each
    requirement.
    """
    assert set(requirements()) == set(smoke.PROGRAMS)
    assert all(
        floor_of(requirement) for of_extra in requirements().values() for requirement in of_extra
    )


def test_an_extra_brings_all_others_but_the_large_ones() -> None:
    """`pip install 'aiohooks[all]'` is for users: nothing of gigabytes, and nothing that only a
    checkout needs.
    """
    (only,) = requirements_of_extra(SEVERAL)
    assert only.name == "aiohooks"
    assert only.extras == set(requirements()) - set(LARGE) - {CORE}


def test_extras_are_for_users() -> None:
    """What only a checkout needs is in dependency groups, but for the commands of the README."""
    assert set(PROJECT["optional-dependencies"]) == set(requirements()) - {CORE} | {
        SEVERAL,
        "examples",
        "test",
    }


@pytest.mark.parametrize("extra", [name for name in smoke.PROGRAMS if name not in TESTED_ELSEWHERE])
def test_the_program_of_an_extra_runs(extra: str) -> None:
    """It does so here, with the newest versions; `.ci/packages` and the command above use
    others.
    """
    need(*(requirement.name for requirement in requirements()[extra]))
    done = run([sys.executable, smoke.__file__, extra])
    assert done.returncode == 0, done.stderr


# -- workflows


def steps(workflow: Path) -> Iterator[dict[str, Any]]:
    """Yield the steps of all jobs of a workflow."""
    for job in yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values():
        yield from job["steps"]


def test_ci_runs_what_contributors_run() -> None:
    """On GitHub, CI runs each session of `.ci/noxfile.py`, and once a week `.ci/run`."""
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    groups = jobs["sessions"]["strategy"]["matrix"]["include"]
    module = ast.parse((ROOT / ".ci" / "noxfile.py").read_text(encoding="utf-8"))
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    sessions = {function.name for function in functions if function.decorator_list}
    assert {name for group in groups for name in group["sessions"].split()} == sessions
    assert ".ci/run --all" in [step.get("run", "") for step in jobs["all"]["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.stem)
def test_actions_have_a_version(workflow: Path) -> None:
    """No action follows a branch that moves between major versions."""
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    assert [name for name in used if not re.search(r"@(release/)?v\d+$|@[0-9a-f]{40}$", name)] == []


def test_only_one_job_may_publish() -> None:
    """Nothing but the job that uploads gets the identity that PyPI trusts, in its environment;
    there is no password.
    """
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    assert "secrets." not in text
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert "environment" not in build
    assert build["permissions"] == {
        "contents": "read",
        "id-token": "write",
        "attestations": "write",
    }
    assert (publish["needs"], publish["environment"]) == ("build", "pypi")
    assert publish["permissions"] == {"id-token": "write"}
    assert [step["uses"].partition("@")[0] for step in publish["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]


def test_github_knows_all_of_the_workflows() -> None:
    """They follow GitHub's schema; there, CI tries them with actionlint as well, whose program
    cannot be had from PyPI.
    """
    command = [program("check-jsonschema"), "--builtin-schema", "vendor.github-workflows"]
    done = run([*command, *map(str, WORKFLOWS)])
    assert done.returncode == 0, done.stdout
