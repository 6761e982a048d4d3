"""Oracle: the update rules in numpy, one element formula after the other, on whole tables.

Imports nothing of the package. Every function returns new (values, state) and leaves its inputs
alone. `keys` are the touched rows; state is a dict of arrays shaped like the values.
"""

import numpy as np


def dense_step(name, values, grads, state, step, *, lr, maximize=False, nesterov=False, **hyper):
    """One dense update as torch.optim documents it; all arrays one shape, float64 inside."""
    everything = np.ones(values.shape, dtype=bool)
    first = step == 1
    return _update(
        name, values, grads, state, step, everything, lr, maximize, nesterov, first, False, hyper
    )


def lazy_step(
    name, table, keys, grads, state, step, *, lr, maximize=False, nesterov=False, **hyper
):
    """One lazy update: rows `keys` ([n], unique) get gradients [n, dim], all others keep all."""
    full = np.zeros(table.shape)
    full[keys] = grads
    touched = np.zeros(table.shape, dtype=bool)
    touched[keys] = True
    return _update(
        name, table, full, state, step, touched, lr, maximize, nesterov, False, True, hyper
    )


def _update(name, values, grads, state, step, touched, lr, maximize, nesterov, first, lazy, hyper):
    p = values.astype(np.float64)
    g = -grads.astype(np.float64) if maximize else grads.astype(np.float64)
    decay = hyper.get("weight_decay", 0.0)
    if name != "adamw":
        g = g + decay * p
    new = {}
    if name == "sgd":
        q = p - lr * g
    elif name == "momentum":
        mu, damp = hyper["momentum"], hyper.get("dampening", 0.0)
        b = g if first else mu * state["momentum_buffer"] + (1 - damp) * g
        q = p - lr * (g + mu * b if nesterov else b)
        new["momentum_buffer"] = b
    elif name == "adagrad":
        s = state["sum"] + g**2
        rate = lr / (1 + (step - 1) * hyper.get("lr_decay", 0.0))
        q = p - rate * g / (np.sqrt(s) + hyper["eps"])
        new["sum"] = s
    elif name in ("adam", "adamw"):
        b1, b2, eps = hyper["beta1"], hyper["beta2"], hyper["eps"]
        m = b1 * state["exp_avg"] + (1 - b1) * g
        s = b2 * state["exp_avg_sq"] + (1 - b2) * g**2
        if name == "adamw":
            p = p * (1 - lr * decay)
        if lazy and name == "adam":
            q = p - lr * np.sqrt(1 - b2**step) / (1 - b1**step) * m / (np.sqrt(s) + eps)
        else:
            q = p - lr * (m / (1 - b1**step)) / (np.sqrt(s / (1 - b2**step)) + eps)
        new["exp_avg"], new["exp_avg_sq"] = m, s
    else:
        raise ValueError(name)
    kept = {slot: np.where(touched, new[slot], state[slot]) for slot in new}
    return np.where(touched, q, values), kept
