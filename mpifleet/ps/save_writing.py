"""One checkpoint on its way from the servers' memory to disk."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from mpifleet.checkpoint import (
    Block,
    Keep,
    Link,
    Newcomer,
    Part,
    Places,
    link_to,
    write_parts,
    writing,
)
from mpifleet.errors import CheckpointError
from mpifleet.ps.chunk_writing import ChunkWriter
from mpifleet.ps.saved_chunks import SavedArray
from mpifleet.ps.told import Teller


class Writing:
    """One checkpoint on its way to disk; on the first server also the file.

    `poll` until it says that all is done; `failure` then says what went wrong, "" for nothing.
    """

    def __init__(
        self,
        newcomer: Newcomer | None,
        temporary: Path,
        places: Places,
        teller: Teller,
        directory: Path,
        keep: Keep,
    ) -> None:
        self.places = places
        self.failure = ""
        self.link: Link | None = None
        """To the file, on the first server, once it is there."""
        self._newcomer, self._temporary = newcomer, temporary
        self._teller, self._directory, self._keep = teller, directory, keep
        self._blocks: list[Block] = []
        self._work: threading.Thread | None = None
        self._next: Callable[[], bool] | None = self._tell

    def run(self, parts: Iterable[Part]) -> None:
        """Write this server's parts now."""
        try:
            with writing(self._directory), self._descriptor() as descriptor:
                self._blocks = write_parts(descriptor, parts)
        except CheckpointError as error:
            self.failure = str(error)

    def run_chunks(
        self, writer: ChunkWriter, arrays: list[SavedArray], level: int, driver: str | None
    ) -> None:
        """Write now what is compressed, after `run`. Collective over the servers."""
        before = (self._blocks, self.failure)
        self._blocks, self.failure = writer.write(
            self._newcomer, self._temporary, arrays, level, driver, *before
        )

    def run_behind(self, parts: list[Part]) -> None:
        """Write them in a thread."""
        self._behind(lambda: self.run(parts))

    def poll(self) -> bool:
        """Take the next step where it can be taken; whether all is done."""
        if self._next is not None and (self._work is None or not self._work.is_alive()):
            while self._next is not None and self._next():
                pass
        return self._next is None

    def _tell(self) -> bool:
        told = [self.failure, [list(block) for block in self._blocks]]
        self._teller.tell(told)
        self._next = self._hear if self._newcomer is not None else self._leave
        return True

    def _leave(self) -> bool:
        if self._teller.is_told():
            self._next = None
        return False

    def _hear(self) -> bool:
        others = self._teller.hear()
        if others is None:
            return False
        failures = [failure for failure, _ in others if failure]
        if not self.failure and failures:
            self.failure = failures[0]
        self._blocks += [Block(*block) for _, blocks in others for block in blocks]
        self._next = self._end
        self._behind(self._publish)
        return False

    def _publish(self) -> None:
        assert self._newcomer is not None
        try:
            if not self.failure:
                with writing(self._directory):
                    self.link = link_to(self._newcomer.publish(self._blocks, self._keep))
        except CheckpointError as error:
            self.failure = str(error)
        finally:
            self._newcomer.close()

    def _end(self) -> bool:
        self._next = None
        return False

    def _behind(self, work: Callable[[], None]) -> None:
        def noted() -> None:
            # Whatever it is: a thread that ends without a word would pass for a save that is done.
            try:
                work()
            except Exception as error:
                self.failure = f"cannot write a checkpoint into {self._directory}: {error!r}"

        self._work = threading.Thread(target=noted, name="checkpoint", daemon=True)
        self._work.start()

    def _descriptor(self) -> AbstractContextManager[int]:
        if self._newcomer is not None:
            return nullcontext(self._newcomer.descriptor)
        return _opened(self._temporary)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
