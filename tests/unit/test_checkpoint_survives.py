"""The previous checkpoint survives every failure of the next one: kills, full disks, refusals."""

import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from mpifleet.checkpoint import (
    open_checkpoint,
    write_checkpoint,
)
from mpifleet.checkpoint import writer as writer_module
from mpifleet.errors import CheckpointError, StallError
from tests.unit.checkpoint_content import ODD_NAMES, REPOSITORY, content, leftovers, value_in


def test_a_save_stopped_before_the_rename_leaves_the_previous_file(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, **content(1.0))

    def refuse(source, target):
        with open_checkpoint(source) as whole:  # the temporary was complete by then
            assert whole.dense("net.weight").value[1, 0] == 2.0
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(CheckpointError, match=r"model\.h5.*No space left"):
        write_checkpoint(tmp_path, **content(2.0))
    assert value_in(tmp_path) == 1.0
    assert leftovers(tmp_path) == []


def test_errors_of_a_block_pass_through(tmp_path):
    write_checkpoint(tmp_path, **content(1.0))
    with pytest.raises(StallError, match="server 1 is silent"):
        write_checkpoint(tmp_path, **content(2.0, fail_at=0))
    assert value_in(tmp_path) == 1.0
    assert leftovers(tmp_path) == []


def run_script(body, *arguments, **options):
    """Start `body` in a process that has this module's imports."""
    head = f"""
        import os, resource, signal, sys
        from pathlib import Path
        sys.path.insert(0, {str(REPOSITORY)!r})
        from mpifleet.checkpoint import write_checkpoint, writer
        from mpifleet.errors import CheckpointError
        from tests.unit.checkpoint_content import content, leftovers, value_in
    """
    code = textwrap.dedent(head) + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def test_a_writer_killed_half_way_leaves_the_previous_file(tmp_path):
    write_checkpoint(tmp_path, **content(1.0))
    process = run_script(
        """
        writer.BLOCK_BYTES = 4096
        written = content(2.0)
        entry = written["sparse"][0]
        read = entry.block
        def block(first, last):
            if first > 500:
                print("half way", flush=True)
                signal.pause()
            return read(first, last)
        entry.block = block
        write_checkpoint(sys.argv[1], **written)
        """,
        tmp_path,
    )
    try:
        assert process.stdout.readline() == "half way\n"
        assert len(leftovers(tmp_path)) == 1
        write_checkpoint(tmp_path, **content(3.0))
        assert len(leftovers(tmp_path)) == 1, "the file of a living writer was removed"
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=30) == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate(timeout=30)
    assert value_in(tmp_path) == 3.0
    private = tmp_path / leftovers(tmp_path)[0]
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    with pytest.raises(CheckpointError):
        open_checkpoint(private)
    write_checkpoint(tmp_path, **content(4.0))
    assert leftovers(tmp_path) == []


def test_a_disk_that_fills_up_leaves_the_previous_file(tmp_path):
    write_checkpoint(tmp_path, **content(1.0))
    process = run_script(
        """
        size = os.path.getsize(sys.argv[1] + "/model.h5")
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
    )
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    lines = len(output.splitlines())
    assert lines > 40, output
    assert output.count(f"cannot write checkpoint {tmp_path}/model.h5: ") == lines, output
    assert output.count("File too large") == lines, output
    assert value_in(tmp_path) == 5.0


def test_too_little_space_is_found_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(
        writer_module.os, "statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=512)
    )
    # Three float32 arrays of [1003, 4] and int64 keys, two of [4, 3], a float64, names, buffers.
    needed = 1003 * (8 + 3 * 16) + 2 * 48 + 8 + len(ODD_NAMES) * 16 + (3 * 8 + 8 + 2)
    message = f"model.h5: it needs {needed:,} bytes, 5,120 bytes are free"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        write_checkpoint(tmp_path, **content())
    assert leftovers(tmp_path) == []


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/sub/model\.h5"):
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
