"""Functions compiled by numba, kept on disk for later processes."""

from collections.abc import Callable, Sequence
from typing import Any

Function = Callable[..., Any]


class Compiler:
    """Raises ImportError on construction without numba."""

    def __init__(self) -> None:
        import numba
        from numba.extending import register_jitable

        self.inline = register_jitable
        """Makes a function callable from compiled ones."""
        self._njit = numba.njit

    def compile(self, function: Function, arguments: Sequence[Any]) -> Function:
        """Compiled, in about a second, by a call that changes nothing and may be repeated."""
        try:
            compiled: Function = self._njit(cache=True, fastmath=False)(function)
            compiled(*arguments)
        except (RuntimeError, OSError):  # no folder to keep it in, or no room
            compiled = self._njit(fastmath=False)(function)
            compiled(*arguments)
        return compiled
