"""Writes what pages say of all optimizers from the classes themselves: `python docs/tables.py`.

These are the tables of docs/optimizers.md, and the first sentence of README.md and docs/index.md. A
test compares the pages with them. What a class keeps is read from the states that it makes,
options and defaults from its groups, and what they do from its docstring: a new optimizer is in
every table.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import amp_ext
from amp_ext.optim.fused_optimizer import FusedOptimizer

DOCS = Path(__file__).resolve().parent
PAGES = [DOCS / "optimizers.md", DOCS / "index.md", DOCS.parent / "README.md"]
SIZE = 64  # elements of a parameter whose states are weighed; a counter is less

Kind = type[FusedOptimizer]
Options = dict[str, Any]

# How parameters are kept, and what a constructor has to be told for that.
PRECISIONS: dict[str, tuple[torch.dtype, Options]] = {
    "fp32": (torch.float32, {}),
    "16-bit + masters": (torch.bfloat16, {}),
    "16-bit": (torch.bfloat16, {"master_weights": False, "state_dtype": None}),
}


def optimizers() -> list[Kind]:
    """Returns the optimizers that the package exports."""
    exported = [getattr(amp_ext.optim, name) for name in amp_ext.optim.__all__]
    classes = [each for each in exported if isinstance(each, type)]
    return [each for each in classes if issubclass(each, FusedOptimizer)]


def made(kind: Kind, dtype: torch.dtype = torch.float32, **options: Any) -> FusedOptimizer:
    """Returns an optimizer of one parameter."""
    return kind([torch.nn.Parameter(torch.zeros(8, SIZE // 8, dtype=dtype))], **options)


def state_of(kind: Kind, dtype: torch.dtype = torch.float32, **options: Any) -> Options:
    """Returns the state that an optimizer makes for a parameter."""
    optimizer = made(kind, dtype, **options)
    optimizer.init_state()
    (param,) = optimizer.param_groups[0]["params"]
    return optimizer.state.get(param, {})


def variants(kind: Kind) -> Iterator[tuple[Options, tuple[str, ...]]]:
    """Yields the fewest options that make an optimizer keep something else, and what it keeps."""
    seen: set[tuple[str, ...]] = set()
    others = {
        name: True if default is False else 0.9
        for name, default in made(kind).defaults.items()
        if isinstance(default, (bool, int, float)) and not default
    }
    for count in range(3):
        for names in itertools.combinations(others, count):
            options = {name: others[name] for name in names}
            try:
                kept = tuple(state_of(kind, **options))
            except (RuntimeError, ValueError):  # options that do not go together
                continue
            if kept not in seen:
                seen.add(kept)
                yield options, kept


def bytes_per_parameter(kind: Kind, precision: str, options: Options) -> int:
    """Returns what an optimizer keeps for each element of a parameter, in bytes."""
    dtype, said = PRECISIONS[precision]
    sizes = [tensor.nbytes for tensor in state_of(kind, dtype, **options, **said).values()]
    return sum(size for size in sizes if size >= SIZE) // SIZE


def class_of_torch(kind: Kind) -> type | None:
    """Returns torch's class of that name, if there is one."""
    return getattr(torch.optim, kind.__name__, None)


def is_option_of_torch(kind: Kind, option: str) -> bool:
    """Returns whether torch's class has an option or, without one, all that torch has of ours."""
    named = [each for each in optimizers() if class_of_torch(each)]
    asked = [kind] if kind in named else [each for each in named if takes(each, option)]
    signatures = [inspect.signature(class_of_torch(each)) for each in asked]
    return bool(signatures) and all(option in each.parameters for each in signatures)


def takes(kind: Kind, option: str) -> bool:
    """Returns whether a constructor has an option: AdamW's groups have one more, of its decay."""
    return option in inspect.signature(kind).parameters


def meaning(kind: Kind, option: str) -> str:
    """Returns what a docstring says of an option, its first sentence."""
    for base in kind.__mro__:
        found = re.search(
            rf"^    {option}: (.+(?:\n     .+)*)",
            inspect.cleandoc(base.__doc__ or ""),
            re.MULTILINE,
        )
        if found:
            text = " ".join(found[1].split()).replace("``", "`")
            return re.split(r"(?<=\.) (?=[A-Z])", text)[0].rstrip(".")
    raise ValueError(f"{kind.__name__}: its docstring must say what {option} does")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def listed(names: Sequence[str]) -> str:
    """Returns names as code."""
    return ", ".join(f"`{name}`" for name in names)


def states() -> str:
    """Returns what each optimizer keeps for a parameter, and its bytes."""
    rows = []
    for kind in optimizers():
        for options, kept in variants(kind):
            said = "".join(f", {name}={value}" for name, value in options.items())
            weights = [str(bytes_per_parameter(kind, each, options)) for each in PRECISIONS]
            rows.append([f"`{kind.__name__}(params{said})`", listed(kept) or "nothing", *weights])
    return table(["", "state of a parameter", *PRECISIONS], rows)


def classes() -> str:
    """Returns what each optimizer is, and whose place it takes."""
    rows = []
    for kind in optimizers():
        theirs = class_of_torch(kind)
        summary = inspect.cleandoc(kind.__doc__ or "").splitlines()[0]
        what = summary.replace("``", "`").rstrip(".")
        rows.append(
            [f"`{kind.__name__}`", f"`torch.optim.{theirs.__name__}`" if theirs else "none", what]
        )
    return table(["class", "in torch", "what it is"], rows)


def options(of_torch: bool) -> str:
    """Returns the options that torch's classes have, or those that they do not have."""
    kinds = optimizers()
    owners: dict[tuple[str, str], list[Kind]] = {}  # of an option and of what it means there
    for kind in kinds:
        for name in made(kind).defaults:
            if takes(kind, name) and is_option_of_torch(kind, name) == of_torch:
                owners.setdefault((name, meaning(kind, name)), []).append(kind)
    names = list(dict.fromkeys(name for name, _ in owners))
    rows = []
    for (name, what), of in sorted(owners.items(), key=lambda item: names.index(item[0][0])):
        where = "all" if of == kinds else listed([kind.__name__ for kind in of])
        defaults = [made(kind).defaults[name] for kind in of]
        if all(default == defaults[0] for default in defaults):
            defaults = defaults[:1]  # else one for each class
        shown = [f"torch.{value}" if name == "state_dtype" else f"{value}" for value in defaults]
        rows.append([f"`{name}`", where, listed(shown), what])
    return table(["option", "of", "default", "what it does"], rows)


# By the names in the comments before them, <!-- table: states -->.
TABLES = {
    "classes": classes,
    "states": states,
    "torch_options": lambda: options(of_torch=True),
    "own_options": lambda: options(of_torch=False),
}
PLACE = re.compile(r"(?<=^<!-- table: )(\w+) -->\n\n(?:\|.*\n)*", re.MULTILINE)
SENTENCE = re.compile(r"(?<=a gradient scaler and fused ).*?(?=, in C\+\+ and CUDA)", re.DOTALL)


def with_tables(page: str) -> str:
    """Returns a page with new tables behind their comments, and all optimizers in its sentence."""
    kinds = sorted(optimizers(), key=lambda kind: (class_of_torch(kind) is None, kind.__name__))
    names = [kind.__name__ for kind in kinds]
    page = SENTENCE.sub(f"{', '.join(names[:-1])} and {names[-1]}", page)
    return PLACE.sub(lambda found: f"{found[1]} -->\n\n{TABLES[found[1]]()}", page)


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(with_tables(each.read_text()))
