"""The previous checkpoint survives every failure of the next one: kills, full disks, refusals."""

import fcntl
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpifleet.checkpoint import (
    open_checkpoint,
    write_checkpoint,
)
from mpifleet.checkpoint import writer as writer_module
from mpifleet.checkpoint.directory import remove_leftovers
from mpifleet.errors import CheckpointError
from tests.unit.checkpoint_content import ODD_NAMES, REPOSITORY, content, leftovers, value_in


@pytest.mark.parametrize("call", range(3), ids=["digests", "file", "latest"])
def test_a_save_stopped_at_any_rename_leaves_the_previous_file(tmp_path, monkeypatch, call):
    write_checkpoint(tmp_path, **content(1.0))
    real, calls = os.replace, []

    def refuse(source, target):
        calls.append(target)
        if len(calls) > call:
            raise OSError(28, "No space left on device", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(CheckpointError, match=r"cannot write a checkpoint into.*No space left"):
        write_checkpoint(tmp_path, **content(2.0))
    monkeypatch.undo()
    # Once the file has its name it is whole, though `latest` does not speak of it.
    assert value_in(tmp_path) == 1.0
    write_checkpoint(tmp_path, **content(3.0))
    assert value_in(tmp_path) == 3.0
    assert leftovers(tmp_path) == []
    assert len(list(tmp_path.glob("*.h5"))) == 1


def run_script(body, *arguments, **options):
    """Start `body` in a process that has this module's imports."""
    head = f"""
        import os, resource, signal, sys
        from pathlib import Path
        sys.path.insert(0, {str(REPOSITORY)!r})
        from mpifleet.checkpoint import Keep, write_checkpoint
        from mpifleet.errors import CheckpointError
        from tests.unit.checkpoint_content import content, leftovers, value_in
        from tests.unit.killed_writer import kill_after
    """
    code = textwrap.dedent(head) + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def test_a_writer_killed_at_any_stage_leaves_a_whole_file(tmp_path):
    """SIGKILL before every tenth call to the system: the newest file equals what was saved."""
    write_checkpoint(tmp_path, **content(1.0))
    killed, before = 0, 1.0
    for number in range(40):
        process = run_script(
            """
            from mpifleet.checkpoint import digests, directory
            digests.BLOCK_BYTES = 8192
            last = int(sys.argv[2])
            kill_after(last)
            write_checkpoint(sys.argv[1], **content(2.0 + last))
            """,
            tmp_path,
            10 * number,
        )
        output, _ = process.communicate(timeout=60)
        value = value_in(tmp_path)
        if process.returncode == 0:
            assert value == 2.0 + 10 * number
            break
        assert process.returncode == -signal.SIGKILL, output
        killed += 1
        assert value in (before, 2.0 + 10 * number)
        before = value
    assert killed > 4, "the counted calls are those of a save"
    write_checkpoint(tmp_path, **content(99.0))
    assert value_in(tmp_path) == 99.0
    assert leftovers(tmp_path) == []


def test_the_file_of_a_living_writer_stays(tmp_path):
    write_checkpoint(tmp_path, **content(1.0))
    process = run_script(
        """
        from mpifleet.checkpoint import writer
        def stop(*_):
            print("half way", flush=True)
            signal.pause()
        writer.write_parts = stop
        write_checkpoint(sys.argv[1], **content(2.0))
        """,
        tmp_path,
    )
    try:
        assert process.stdout.readline() == "half way\n"
        assert leftovers(tmp_path) == [".model-000002.h5.tmp"]
        write_checkpoint(tmp_path, **content(3.0))
        assert leftovers(tmp_path) == [".model-000002.h5.tmp"], "a living writer's file is gone"
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=30) == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate(timeout=30)
    assert value_in(tmp_path) == 3.0
    private = tmp_path / leftovers(tmp_path)[0]
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    with pytest.raises(CheckpointError, match="incomplete"):
        open_checkpoint(private)
    write_checkpoint(tmp_path, **content(4.0))
    assert leftovers(tmp_path) == []


def test_two_writers_at_once_lose_nothing(tmp_path):
    script = """
        for number in range(15):
            write_checkpoint(sys.argv[1], **content(float(sys.argv[2]) + number), keep=Keep(100))
        """
    writers = [run_script(script, tmp_path, start) for start in (100, 200, 300)]
    for process in writers:
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0, output
    files = sorted(tmp_path.glob("model-*.h5"))
    assert len(files) == 45
    found = {float(value_in(path)) for path in files}
    assert found == {float(start + number) for start in (100, 200, 300) for number in range(15)}
    assert leftovers(tmp_path) == []


def test_a_file_that_gets_its_name_while_another_writer_looks_keeps_its_digests(
    tmp_path, monkeypatch
):
    path = write_checkpoint(tmp_path, **content(1.0))
    private = path.rename(tmp_path / f".{path.name}.tmp")  # its digests have their name before it
    real, looks = Path.exists, []

    def exists(self):
        found = real(self)
        if self in (path, private):
            looks.append(self)
            if len(looks) == 2:  # after the one look for what killed writers left
                private.rename(path)
        return found

    with open(private, "rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        monkeypatch.setattr(Path, "exists", exists)
        remove_leftovers(tmp_path)
        monkeypatch.undo()
    assert len(looks) >= 2
    assert value_in(tmp_path) == 1.0


def test_a_disk_that_fills_up_leaves_the_previous_file(tmp_path):
    path = write_checkpoint(tmp_path, **content(1.0))
    process = run_script(
        """
        size = os.path.getsize(sys.argv[2])
        for limit in range(0, size, size // 40):  # bytes beyond which no file may grow
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                write_checkpoint(sys.argv[1], **content(2.0))
            except CheckpointError as error:
                print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert value_in(sys.argv[1]) == 1.0
        assert leftovers(Path(sys.argv[1])) == []
        write_checkpoint(sys.argv[1], **content(5.0))
        """,
        tmp_path,
        path,
    )
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    lines = len(output.splitlines())
    assert lines >= 40, output
    assert output.count(f"cannot write a checkpoint into {tmp_path}: ") == lines, output
    assert output.count("File too large") == lines, output
    assert value_in(tmp_path) == 5.0


def test_too_little_space_is_found_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(
        writer_module.os, "statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=512)
    )
    # Three float32 arrays of [1003, 4] and int64 keys, two of [4, 3], a float64, names, buffers.
    needed = 1003 * (8 + 3 * 16) + 2 * 48 + 8 + len(ODD_NAMES) * 16 + (3 * 8 + 8 + 2)
    message = f"{tmp_path}: it needs {needed:,} bytes, 5,120 bytes are free"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        write_checkpoint(tmp_path, **content())
    assert leftovers(tmp_path) == []


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"into .*file/sub: "):
        write_checkpoint(tmp_path / "file" / "sub", **content())
    process = run_script(
        """
        import tempfile
        closed = tempfile.mkdtemp(dir="/tmp")
        os.chmod(closed, 0o555)
        written = content()  # imports what another user may not read
        if os.geteuid() == 0:
            os.seteuid(65534)  # root may write everywhere
        try:
            write_checkpoint(closed, **written)
        except CheckpointError as error:
            print(error)
            assert closed in str(error) and "Permission denied" in str(error)
        else:
            sys.exit("no error")
        finally:
            os.seteuid(os.getuid())
            os.rmdir(closed)
        """
    )
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
