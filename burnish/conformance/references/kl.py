"""KL estimators of one token, d = log_prob - ref_log_prob."""

from __future__ import annotations

import math

from burnish.conformance.references.loops import clamp


def k1(d: float) -> float:
    """d."""
    return d


def absolute(d: float) -> float:
    """abs(d)."""
    return abs(d)


def k2(d: float) -> float:
    """d^2 / 2."""
    return d * d / 2


def k3(d: float) -> float:
    """exp(-d) + d - 1; -d clamped to +-20 and the result to +-10."""
    x = clamp(-d, -20.0, 20.0)
    return clamp(math.exp(x) - x - 1, -10.0, 10.0)


_FORMS = {"kl": k1, "k1": k1, "abs": absolute, "mse": k2, "k2": k2, "low_var_kl": k3, "k3": k3}

# A `+` changes the gradient, not the value.
KL_REFERENCES = {f"{name}{suffix}": form for suffix in ("", "+") for name, form in _FORMS.items()}
