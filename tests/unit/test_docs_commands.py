"""Commands and links of the documentation are real: programs, files, options, targets, extras."""

import configparser
import functools
import itertools
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from mpifleet.cli import main as cli
from tests.python_process import ROOT, run_python

PAGES = sorted(
    path
    for folder in (".", "docs", "slurm", "examples", "benchmarks")
    for path in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)\)")
SHELL = ("bash", "sh", "console")
LAUNCHERS = ("mpirun", "mpiexec", "srun")


def commands(page: Path) -> list[tuple[str, ...]]:
    """The words of every command line in the page's shell blocks, comments taken off."""
    found = []
    for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language in SHELL:
            for line in text.replace("\\\n", " ").splitlines():
                if words := shlex.split(line.removeprefix("$ "), comments=True):
                    found.append(tuple(words))
    return found


CASES = [
    pytest.param(page, words, id=f"{page.relative_to(ROOT)}: {shlex.join(words)}"[:90])
    for page in PAGES
    for words in commands(page)
]


def located(name: str, page: Path) -> Path:
    """The file that a page means by `name`: seen from the top of the project or from the page."""
    for folder in (ROOT, page.parent):
        if (folder / name).exists():
            return folder / name
    pytest.fail(f"{name} is neither at the top nor beside {page.relative_to(ROOT)}")


@functools.cache
def help_of(*program: str) -> str:
    """What a Python program prints for --help."""
    return run_python(*program, "--help")


def check_options(words: tuple[str, ...], *program: str) -> None:
    text = help_of(*program)
    for word in words:
        if word.startswith("-"):
            name = word.split("=")[0]
            assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text), (
                f"{name} is no option of {program}"
            )


def check_python(words: tuple[str, ...], page: Path) -> None:
    """words: what follows `python`."""
    if words[0] == "-u":
        words = words[1:]
    if words[0] != "-m":
        check_options(words[1:], str(located(words[0], page)))
    elif words[1] == "pip":
        check_pip(words[2:])
    elif words[1] == "pytest":
        assert all(located(word, page) for word in words[2:] if not word.startswith("-"))
    else:
        check_options(words[2:], *words[:2])


def check_pip(words: tuple[str, ...]) -> None:
    assert words[0] == "install"
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for option, word in itertools.pairwise(words):
        if option in ("-c", "-r"):
            assert (ROOT / word).is_file(), word
    for word in words:
        if extras := re.search(r"\[(.+)\]$", word):
            assert set(extras[1].split(",")) <= set(config["options.extras_require"])


def check(words: tuple[str, ...], page: Path) -> None:
    """Fails when the command could not work as written."""
    while "=" in words[0]:
        words = words[1:]
    program, rest = Path(words[0]).name, words[1:]
    if program in ("python", "python3"):
        check_python(rest, page)
    elif program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert all(word in targets or "=" in word for word in rest)
    elif program == "mpifleet":
        arguments = cli._parser().parse_args(rest)
        if "script" in arguments:
            check_python((arguments.script, *arguments.args), page)
    elif program in LAUNCHERS:
        check_python(rest[rest.index("python") + 1 :], page)
    elif program == "sbatch":
        script = next(word for word in rest if not word.startswith("-"))
        assert located(script, page)
        check_options(rest[rest.index(script) + 1 :], "examples/ctr_dnn/train.py")
    elif program == "pip":
        check_pip(rest)
    elif program == "source":
        assert rest[0].endswith("/bin/activate"), "made by the venv command before it"
    elif program == "cd":
        assert located(rest[0], page).is_dir()
    else:
        pytest.fail(f"a command that no rule here knows: {shlex.join(words)}")


@pytest.mark.parametrize(("page", "words"), CASES)
def test_command_exists(page, words):
    check(words, page)


def test_there_are_commands_to_check():
    assert len(CASES) > 10


@pytest.mark.parametrize(
    "line",
    ["make dema", "python examples/none.py", "mpifleet walk x.py", "pip install -e .[nothing]"],
)
def test_a_wrong_command_is_found(line):
    with pytest.raises((AssertionError, SystemExit, pytest.fail.Exception)):
        check(tuple(shlex.split(line)), ROOT / "README.md")


def test_a_wrong_option_is_found():
    with pytest.raises(AssertionError, match="--nonsense"):
        check(("python3", "-m", "tools.test", "--nonsense"), ROOT / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in link:
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("script", sorted((ROOT / "slurm").glob("*.sbatch")), ids=lambda p: p.name)
def test_batch_scripts_are_shell(script):
    subprocess.run(["bash", "-n", script], check=True, timeout=20)


def readme_example() -> str:
    blocks = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    return next(text for language, text in blocks if language == "python")


def test_the_readme_example_trains_in_one_process(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(readme_example() + "print('loss', loss.item())\n")
    printed = run_python(script, cwd=tmp_path)
    assert float(printed.split()[-1]) < 0.05
    assert (tmp_path / "checkpoint").is_dir()
