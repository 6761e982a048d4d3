"""Virtual environments under .venvs, made once and made again when the requirements change."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.processes import environment, run

ROOT = Path(__file__).parents[1]
OLDEST_PYTHON = (3, 10)
INSTALL_LIMIT_S = 900.0
TORCH_SIZE = (
    "PyTorch is next: its default wheel for Linux carries CUDA, about 5 GB; PyTorch's CPU build, "
    "about 1 GB, comes by PIP_EXTRA_INDEX_URL or pip's settings (see its installation page)"
)
_STAMP = ".mpifleet-stamp"
_PACKAGE_FILES = ("setup.cfg", "constraints.txt", "pyproject.toml")


class SetUpError(RuntimeError):
    """The set-up could not be completed; the message says what to do."""


def prepare(name: str, extras: str, check: str) -> Path:
    """Path of the virtual environment `name` with the package and its `extras` installed.

    extras: comma-separated, may be empty.  check: an import statement that must work there.
    Does nothing when an earlier call left everything as it should be.
    """
    target = f"{ROOT}[{extras}]" if extras else str(ROOT)
    arguments = ["--constraint", str(ROOT / "constraints.txt"), "--editable", target]
    return _prepare(name, [(arguments, {})], _stamp(_PACKAGE_FILES, extras), check)


def prepare_built(
    name: str, steps: Sequence[tuple[list[str], Mapping[str, str]]], check: str
) -> Path:
    """The same without the package: what `pip install` makes of each step's arguments, in order.

    steps: (arguments, what the environment has on top).  The pinned versions are taken.
    """
    pinned = ["--constraint", str(ROOT / "constraints.txt")]
    stamp = _stamp(("constraints.txt",), repr(steps))
    return _prepare(name, [([*pinned, *more], env) for more, env in steps], stamp, check)


def prepare_listed(name: str, requirements: str, check: str) -> Path:
    """The same without the package: what a requirements file (from the top) lists, no more."""
    stamp = _stamp((requirements,), "")
    return _prepare(name, [(["--requirement", str(ROOT / requirements)], {})], stamp, check)


def is_ready(name: str) -> bool:
    """Whether the virtual environment `name` was made ready once."""
    return (ROOT / ".venvs" / name / _STAMP).exists()


def _prepare(
    name: str, steps: Sequence[tuple[list[str], Mapping[str, str]]], wanted: str, check: str
) -> Path:
    venv = ROOT / ".venvs" / name
    stamp = venv / _STAMP
    if stamp.exists() and stamp.read_text() == wanted and not _failure(venv, check):
        return venv
    print(f"preparing {venv.relative_to(ROOT)}", flush=True)
    pip = _make(venv)
    if "torch" in check and _failure(venv, "import torch"):
        print(TORCH_SIZE, flush=True)
    stamp.unlink(missing_ok=True)
    for arguments, extra in steps:
        install(pip, *arguments, extra=extra)
    if failure := _failure(venv, check):
        raise SetUpError(f"{venv}: `{check}` fails after the installation:\n{failure}")
    stamp.write_text(wanted)
    return venv


def install(pip: list[str], *arguments: str, extra: Mapping[str, str] | None = None) -> None:
    """Runs one ``pip install``; raises SetUpError when it fails.

    extra: what its environment has on top.
    """
    # Python compiles what is imported when it is; most of torch never is.
    command = [*pip, "install", "--quiet", "--no-compile", *arguments]
    if run(command, env=environment(extra=extra), limit_s=INSTALL_LIMIT_S, cwd=ROOT).status != 0:
        raise SetUpError("pip install failed: see its message above")


def pip_of(venv: Path) -> list[str]:
    """The command that installs into `venv`: its own pip, or ours where it has none."""
    if (venv / "bin" / "pip").exists():
        return [str(venv / "bin" / "python"), "-m", "pip"]
    if importlib.util.find_spec("pip") is None:
        raise SetUpError(f"{sys.executable} has neither ensurepip nor pip: install one of them")
    return [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python")]


def _make(venv: Path) -> list[str]:
    if sys.version_info < OLDEST_PYTHON:
        raise SetUpError(f"Python {sys.version.split()[0]} is too old; 3.10 or newer is needed")
    if not (venv / "bin" / "python").exists():
        shutil.rmtree(venv, ignore_errors=True)
        # Distributions ship Python without ensurepip; pip can install from outside then.
        bare = [] if importlib.util.find_spec("ensurepip") else ["--without-pip"]
        command = [sys.executable, "-m", "venv", *bare, str(venv)]
        if run(command, env=environment(), limit_s=120, cwd=ROOT).status != 0:
            raise SetUpError("the virtual environment could not be made: see the message above")
        if bare:
            install(pip_of(venv), "pip")
    return pip_of(venv)


def _failure(venv: Path, check: str) -> str:
    """What `check` prints when it fails in `venv`; empty when it works."""
    python = venv / "bin" / "python"
    if not python.exists():
        return f"{python} is not there"
    command = [str(python), "-c", check]
    ended = run(command, env=environment(venv), limit_s=120, cwd=ROOT, quiet=True)
    return "" if ended.status == 0 else f"status {ended.status}\n{ended.output}"


def _stamp(files: tuple[str, ...], extras: str) -> str:
    digest = hashlib.sha256()
    for name in files:
        digest.update((ROOT / name).read_bytes())
    return f"{digest.hexdigest()} {extras} {ROOT} {sys.version.split()[0]}\n"
