"""`python -m aiohooks`: what all commands share, and the commands that show files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import aiohooks as ah
from aiohooks.__main__ import main
from tests.support import processes
from tests.support.commands import ENVIRONMENT, command
from tests.support.needs import program
from tests.support.sessions import counting_graph, run_session

pytestmark = [pytest.mark.every_python, pytest.mark.slow]


async def saved(directory: Path, runs: int) -> None:
    """A job that saved at its beginning and at its end."""
    creator = ah.ChiefSessionCreator(counting_graph(), checkpoint_dir=directory)
    await run_session(ah.AsyncMonitoredSession(creator, [ah.CheckpointSaverHook()]), runs, "train")


@pytest.mark.sample
async def test_checkpoints_are_listed_and_explained(tmp_path: Path) -> None:
    """It lists all, says what is wrong with a damaged one, and changes nothing."""
    await saved(tmp_path, 3)
    newest = max(path.name for path in tmp_path.glob("step-*"))  # noqa: ASYNC240 - a test
    good = command("checkpoints", tmp_path)
    assert good.returncode == 0, good.stderr
    assert good.stderr == ""
    assert f"{newest}: good" in good.stdout
    state = tmp_path / newest / "state.msgpack"
    data = bytearray(state.read_bytes())
    data[-1] ^= 1
    state.write_bytes(data)
    damaged = command("checkpoints", tmp_path)
    assert damaged.returncode == 1
    assert "checksum" in damaged.stdout
    assert state.exists()


COMMANDS = ("run", "checkpoints", "why")


@pytest.mark.sample
@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_that_teaches(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its help has an example that begins with the program's own name, and all of its exit
    codes.
    """
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    program = shown.removeprefix("usage: ").partition(f" {name} ")[0]
    examples = shown.partition("\nexample:\n")[2].partition("\n\n")[0].splitlines()
    assert examples
    assert all(line.startswith(f"  {program} {name} ") for line in examples)
    codes = [line.split()[0] for line in shown.partition("\nexit codes:\n")[2].splitlines()]
    assert codes[:3] == ["0", "1", "2"]


def listed_commands(shown: str) -> list[str]:
    """Return the commands that a help lists."""
    lines = (line for line in shown.splitlines() if line.startswith("    ") and line[4] != " ")
    return [line.split()[0] for line in lines]


def test_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """The help of the program names each command, and the exit codes that all share."""
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert listed_commands(shown) == list(COMMANDS)
    assert "143  ended by SIGTERM" in shown


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """`aiohooks` alone shows its help, with exit code 2."""
    assert main([]) == 2
    shown = capsys.readouterr()
    assert (shown.out, listed_commands(shown.err)) == ("", list(COMMANDS))


def test_what_is_not_understood() -> None:
    """It says how it is used, with exit code 2."""
    for arguments in (("nonsense",), ("checkpoints",)):
        done = command(*arguments)
        assert done.returncode == 2
        assert "usage: python -m aiohooks" in done.stderr


JOBS = """
async def main(task): ...
async def taskless(): ...
def plain(task): ...
"""
REFUSED = {
    "run jobs": "'jobs' does not name a function; give module:function, such as train:main",
    "run jobs:": "'jobs:' does not name a function",
    "run a/jobs:main": "'a/jobs:main' does not name a function",
    "run jobs.py:main": "'jobs.py:main' has the name of a file; give the module: jobs:main",
    "run jobbs:main": "there is no module 'jobbs' in ",
    "run jobs.inner:main": "there is no module 'jobs.inner' in ",
    "run jobs:mains": (
        "jobs has no function of this name; give a coroutine function that takes the task; did you"
        " mean 'main'"
    ),
    "run jobs:plain": "jobs has 'plain', which is <function plain",
    "run jobs:taskless": "which is called with the Task: too many positional arguments",
    "run jobs:main --store memory://": "store='memory://' is for one process",
    "run jobs:main --store redsi://h": "unknown kind of step store 'redsi'; did you mean 'redis'",
    "run jobs:main --run ": "run='': give a printable name",
    "run jobs:main --store ray://x": "--store ray:// is for processes of a Ray cluster",
    "run jobs:main --engine ray": "unrecognized arguments: --engine ray",
    "run jobs:main --workers -1": "argument --workers: give a number of at least 0\n",
    "run jobs:main --max-restarts few": "argument --max-restarts: give a number of at least 0\n",
    "run jobs:main --grace-secs soon": "argument --grace-secs: give seconds, 0 or more\n",
    "run jobs:main --grace-secs inf": "argument --grace-secs: give seconds, 0 or more\n",
    "why digits": "argument PID: give the PID of a process",
    "why -5": "argument PID: give the PID of a process",
    "why redis://:secret@h": "argument PID: give the PID of a process",
    "why http://user:secret@h/": "argument PID: give the PID of a process",
    "why 4242 --run digits": "unrecognized arguments: --run digits",
}


@pytest.mark.sample
@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has the value and what to give instead, never a password; nothing was started,
    and the exit code is 2.
    """
    (tmp_path / "jobs.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "jobs", raising=False)
    try:
        code: object = main(line.split(" "))
    except SystemExit as end:
        code = end.code
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert REFUSED[line] in shown.err
    assert "secret" not in shown.err


def installed(folder: Path) -> Path:
    """Make the program that an entry point makes, and return its path."""
    program = folder / "aiohooks"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nfrom aiohooks.__main__ import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    return program


def test_the_installed_program_has_its_own_name(tmp_path: Path) -> None:
    """The program that an entry point makes calls `main`; its help and its errors have its name."""
    line = [str(installed(tmp_path))]
    assert processes.run(line, env=ENVIRONMENT).stderr.startswith("usage: aiohooks ")
    done = processes.run([*line, "run", "nonsense"], env=ENVIRONMENT)
    assert (done.returncode, done.stderr.split(" does ")[0]) == (2, "aiohooks: 'nonsense'")


def test_output_that_no_one_reads(tmp_path: Path) -> None:
    """`aiohooks checkpoints DIR | head -0` ends without a traceback."""
    line = f"{sys.executable} -m aiohooks checkpoints {tmp_path} | true; exit ${{PIPESTATUS[0]}}"
    done = processes.run([program("bash"), "-c", line], env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (1, "")


def packages_loaded_by(*arguments: str) -> set[str]:
    """Return the packages that a command loads."""
    code = """
import sys
from aiohooks.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
loaded = [name for name in sys.modules if name.startswith("aiohooks.")]
print(*sorted({name.split(".")[1] for name in loaded}), file=sys.stderr)
"""
    done = processes.run([sys.executable, "-c", code, *arguments], env=ENVIRONMENT)
    return set(done.stderr.splitlines()[-1].split())


def test_a_command_loads_what_it_needs(tmp_path: Path) -> None:
    """Help loads little more than `import aiohooks` does, and a command only its own packages."""
    shown = {"__main__", "_command_line", "_core", "dispatch", "errors"}
    assert packages_loaded_by("--help") <= shown
    assert packages_loaded_by("checkpoints", str(tmp_path)) <= {*shown, "checkpoint"}
    assert packages_loaded_by("why", "1").isdisjoint({"distributed", "training"})
