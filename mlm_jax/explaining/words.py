"""How numbers of the walkthrough read."""

import math
from decimal import ROUND_HALF_EVEN, Decimal

MANY = 9  # decimals, beyond which a number is written as a power of ten


def number(x):
    """Returns `x` with three decimals, or two digits where that would leave nothing."""
    x = float(x)
    if abs(x) >= 1e5 or 0 < abs(x) < 10**-MANY:
        mantissa, exponent = f"{x:.2e}".split("e")
        return f"{mantissa} × 10{superscript(int(exponent))}".replace("-", "−")
    if float(f"{x:.3f}") == 0 and x:
        decimals = 1 - math.floor(math.log10(abs(x)))
        return f"{x:.{decimals}f}".replace("-", "−")
    text = f"{x + 0.0:,.3f}".replace("-", "−")
    is_whole = math.isclose(x, round(x), rel_tol=1e-6)  # but for float32's last digits
    return text.removesuffix(".000") if is_whole else text


def share(loss):
    """Returns exp(-loss), a probability, never as 1 or 0 if it is neither.

    By the loss and not by itself: of a float32 probability of 1 - 1e-9 nothing is left
    of what it lacks.
    """
    if loss == 0:
        return "1"
    p = math.exp(-loss)
    if p < 0.5:
        if p >= 0.01:
            return f"{p:.3f}"
        return f"{p:.{2 - math.floor(math.log10(p))}f}" if p >= 1e-9 else number(p)
    lacks = Decimal(-math.expm1(-loss))
    if lacks < Decimal(10) ** -MANY:
        return f"1 − {number(float(lacks))}"
    decimals = 3
    while True:
        step = Decimal(1).scaleb(-decimals)
        rounded = (1 - lacks).quantize(step, ROUND_HALF_EVEN)
        if rounded < 1:
            return str(rounded)
        decimals += 1


def added(x):
    """Returns `x` as what follows a sum."""
    return f"− {number(-x)}" if x < 0 else f"+ {number(x)}"


def percent(part):
    return f"{100 * part:.1f}%"


def superscript(n):
    return str(n).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def set_of(places):
    return "{" + ", ".join(map(str, places)) + "}"


def name_of(function):
    """Returns where a function of this code is: module and name."""
    return f"{function.__module__}.{function.__qualname__}"
