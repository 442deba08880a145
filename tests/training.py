"""The names of ``optimizer_cases``, as the tests know them that have not moved yet."""

from optimizer_cases import *  # noqa: F403
