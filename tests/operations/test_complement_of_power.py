"""The bias corrections of Adam, ``1 - beta ** step``, which lose no digits to cancellation."""

from __future__ import annotations

import decimal
import math
import random

import pytest

from amp_ext import ops

STEPS = [*range(1, 1001), *random.Random(0).sample(range(1001, 2**24), 199), 2**24]


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 0.95, 0.98, 0.99, 0.999, 0.9999, 0.99999])
def test_bias_corrections_are_exact_to_two_units_in_the_last_place(beta):
    with decimal.localcontext() as context:
        context.prec = 60
        for step in STEPS:
            exact = 1 - decimal.Decimal(beta) ** step
            got = ops._C.complement_of_power(beta, step)
            distance = abs(decimal.Decimal(got) - exact) / decimal.Decimal(math.ulp(float(exact)))
            assert distance <= 2, f"step {step}: {got}, which is off by {distance} units"


@pytest.mark.parametrize(("beta", "step"), [(0.999, 1), (0.5, 3), (0.0, 7), (0.9, 0)])
def test_where_the_power_is_exact_so_is_its_complement(beta, step):
    assert ops._C.complement_of_power(beta, step) == 1 - beta**step
