"""First values of table rows, a pure function of (seed, key, column).

A row is the same whichever server makes it, however many servers there are and in whatever chunks
it is made. Each value is one 64-bit hash (the splitmix64 mixer of Steele, Lea and Flood, 2014)
turned into a number by operations that round once, so the bits also agree between machines: the
normal quantile is Wichura's AS 241 with a logarithm of our own instead of the C library's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpifleet.errors import ConfigError, TableError

KINDS = ("uniform", "normal", "zeros", "constant")
"""uniform: (-scale, scale); normal: mean 0, standard deviation scale; constant: scale."""

_BLOCK_VALUES = 1 << 14  # hash, scratch and floats of one block stay in cache
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_LOG_2 = 0.6931471805599453
_ROOT_HALF = 0.7071067811865476
_ONE_BITS = np.uint64(0x3FF0000000000000)  # float64 1.0: a 52-bit mantissa below it is in [1, 2)

# AS 241 (PPND16), numerators and denominators of the three regions, lowest power first.
_CENTRAL = (
    (
        3.3871328727963666080e0,
        1.3314166789178437745e2,
        1.9715909503065514427e3,
        1.3731693765509461125e4,
        4.5921953931549871457e4,
        6.7265770927008700853e4,
        3.3430575583588128105e4,
        2.5090809287301226727e3,
    ),
    (
        1.0,
        4.2313330701600911252e1,
        6.8718700749205790830e2,
        5.3941960214247511077e3,
        2.1213794301586595867e4,
        3.9307895800092710610e4,
        2.8729085735721942674e4,
        5.2264952788528545610e3,
    ),
)
_NEAR_TAIL = (
    (
        1.42343711074968357734e0,
        4.63033784615654529590e0,
        5.76949722146069140550e0,
        3.64784832476320460504e0,
        1.27045825245236838258e0,
        2.41780725177450611770e-1,
        2.27238449892691845833e-2,
        7.74545014278341407640e-4,
    ),
    (
        1.0,
        2.05319162663775882187e0,
        1.67638483018380384940e0,
        6.89767334985100004550e-1,
        1.48103976427480074590e-1,
        1.51986665636164571966e-2,
        5.47593808499534494600e-4,
        1.05075007164441684324e-9,
    ),
)
_FAR_TAIL = (
    (
        6.65790464350110377720e0,
        5.46378491116411436990e0,
        1.78482653991729133580e0,
        2.96560571828504891230e-1,
        2.65321895265761230930e-2,
        1.24266094738807843860e-3,
        2.71155556874348757815e-5,
        2.01033439929228813265e-7,
    ),
    (
        1.0,
        5.99832206555887937690e-1,
        1.36929880922735805310e-1,
        1.48753612908506148525e-2,
        7.86869131145613259100e-4,
        1.84631831751005468180e-5,
        1.42151175831644588870e-7,
        2.04426310338993978564e-15,
    ),
)


def table_seed(seed: int, table_name: str) -> int:
    """Seed of one table in [0, 2**63): the same in every process, different for every name."""
    text = f"{int(seed)}:{table_name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def initial_rows(
    kind: str, keys: Any, dim: int, *, seed: int, scale: float, dtype: Any = np.float32
) -> np.ndarray:
    """First values of the rows `keys`: [n, dim] of `dtype`.

    keys: integers [n], >= 0, any order, duplicates allowed. seed: the table's, see `table_seed`.
    Raises ConfigError for an unknown kind or scale, TableError for bad keys.
    """
    wanted = np.asarray(keys)
    if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
        raise TableError(f"keys are {wanted.dtype} {list(wanted.shape)}: use integers [n]")
    if wanted.size and wanted.dtype.kind == "i" and wanted.min() < 0:
        raise TableError(f"key {wanted.min()} is negative")
    rows = np.empty((wanted.size, dim), dtype=dtype)
    if _fill_without_keys(rows, kind, scale):
        return rows
    hashed = wanted.astype(np.uint64)
    per_block = max(1, _BLOCK_VALUES // max(1, dim))
    for first in range(0, wanted.size, per_block):
        block = slice(first, first + per_block)
        _fill_block(rows[block], kind, hashed[block], seed, scale)
    return rows


def fill_shard(
    out: np.ndarray, kind: str, first_key: int, stride: int, *, seed: int, scale: float
) -> None:
    """Set out[i] to the first values of row first_key + i*stride, in place.

    out: float32 or float64 [n, dim], for example a window's memory. The temporaries are about
    1 MiB (four rows of float64 where a row is longer than that).
    """
    if out.ndim != 2 or first_key < 0 or stride < 1:
        raise TableError(
            f"out has shape {list(out.shape)}, first_key={first_key}, stride={stride}: "
            "use [n, dim], first_key >= 0, stride >= 1"
        )
    if _fill_without_keys(out, kind, scale):
        return
    num_rows, dim = out.shape
    per_block = max(1, _BLOCK_VALUES // max(1, dim))
    for first in range(0, num_rows, per_block):
        last = min(first + per_block, num_rows)
        keys = np.arange(first, last, dtype=np.uint64)
        keys *= np.uint64(stride)
        keys += np.uint64(first_key)
        _fill_block(out[first:last], kind, keys, seed, scale)


def _fill_without_keys(out: np.ndarray, kind: str, scale: float) -> bool:
    """Check kind, scale and dtype; fill at once where the rows do not depend on their keys."""
    if kind not in KINDS:
        raise ConfigError(f"initializer {kind!r} is unknown; use {', '.join(KINDS)}")
    if not math.isfinite(scale) or (scale < 0 and kind != "constant"):
        raise ConfigError(f"scale={scale!r} of initializer {kind!r} must be finite and >= 0")
    if out.dtype not in (np.float32, np.float64):
        raise ConfigError(f"rows of dtype {out.dtype} cannot be initialized; use float32, float64")
    if kind in ("zeros", "constant"):
        out[...] = scale if kind == "constant" else 0.0
    return kind in ("zeros", "constant")


def _fill_block(out: np.ndarray, kind: str, keys: np.ndarray, seed: int, scale: float) -> None:
    unit = _unit_interval(keys, out.shape[1], seed)
    unit -= 0.5  # exact
    if kind == "uniform":
        unit *= 2.0 * scale
    else:
        _normal_quantile(unit)
        unit *= scale
    out[...] = unit


def _unit_interval(keys: np.ndarray, dim: int, seed: int) -> np.ndarray:
    """Float64 [n, dim] in (0, 1): odd multiples of 2**-53, one for each (seed, key, column)."""
    start = _mixed_number((int(seed) + _GOLDEN) & _MASK)
    row_hash = keys * np.uint64(_GOLDEN)
    row_hash += np.uint64(start)
    _mix(row_hash, np.empty_like(row_hash))
    columns = np.arange(1, dim + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    bits = row_hash[:, None] + columns
    _mix(bits, np.empty_like(bits))
    bits >>= np.uint64(12)
    bits |= _ONE_BITS
    unit = bits.view(np.float64)
    unit -= 1.0
    unit += 2.0**-53
    return unit


def _mix(bits: np.ndarray, scratch: np.ndarray) -> None:
    """The splitmix64 mixer, in place."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        np.right_shift(bits, np.uint64(shift), out=scratch)
        bits ^= scratch
        bits *= factor
    np.right_shift(bits, np.uint64(31), out=scratch)
    bits ^= scratch


def _mixed_number(number: int) -> int:
    bits = np.array([number], dtype=np.uint64)
    _mix(bits, np.empty_like(bits))
    return int(bits[0])


def _normal_quantile(q: np.ndarray) -> None:
    """Replace q in (-0.5, 0.5) by the standard normal quantile of q + 0.5, in place."""
    r = np.abs(q)
    tails = np.flatnonzero(r > 0.425)
    outer = q.reshape(-1)[tails]
    np.multiply(q, q, out=r)
    np.subtract(0.180625, r, out=r)
    q *= _ratio(_CENTRAL, r)
    tail = 0.5 - np.abs(outer)  # exact: probability beyond
    distance = np.sqrt(-_log(tail))
    far = distance > 5.0  # one value in 4e10
    size = _ratio(_NEAR_TAIL, distance - 1.6)
    size[far] = _ratio(_FAR_TAIL, distance[far] - 5.0)
    q.reshape(-1)[tails] = np.copysign(size, outer)


def _ratio(coefficients: tuple[Sequence[float], Sequence[float]], x: np.ndarray) -> np.ndarray:
    upper, lower = (_polynomial(part, x) for part in coefficients)
    upper /= lower
    return upper


def _polynomial(coefficients: Sequence[float], x: np.ndarray) -> np.ndarray:
    total = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        total += coefficient
        total *= x
    total += coefficients[0]
    return total


def _log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm by the series of atanh: no library function, the same bits everywhere."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < _ROOT_HALF
    mantissa *= 1.0 + low
    power = exponent - low
    z = (mantissa - 1.0) / (mantissa + 1.0)  # |z| <= 0.172: z**26 < 2**-64
    series = _polynomial([1.0 / (2 * k + 1) for k in range(13)], z * z)
    return power * _LOG_2 + 2.0 * z * series
