"""The C++ interface: its checks, and what Python and C++ do alike."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_corpus as corpus
import pytest
import torch
from harness.call_scenarios import Saved, Scenario, comparable, do, whole
from harness.optimizer_cases import CLASSES
from harness.other_packages import OF_OTHERS
from harness.refused_calls import REFUSED_CALLS
from torch import Tensor

from amp_ext import ops, optim

PROGRAM = Path(__file__).resolve().parents[1] / "cpp" / "program"

Run = Callable[..., str]

CHECKS = [
    name
    for file in sorted(PROGRAM.glob("checks_*.h"))
    for name in re.findall(r"^AMP_EXT_CHECK\((\w+)\)", file.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_of_the_program_passes(run: Run, name: str) -> None:
    run("check", name)


# Runs.


def do_in_cpp(run: Run, scenario: Scenario, folder: Path) -> Saved:
    """Returns what came of a scenario in C++, as Python reads it."""
    torch.save(whole(scenario), folder / "scenario.pt")
    run("do", str(folder))
    return torch.load(folder / "cpp.pt", weights_only=True)


def assert_same(mine: Any, theirs: Any, place: str = "") -> None:
    """Compares keys, dtypes, shapes and bits."""
    if isinstance(theirs, dict):
        assert mine.keys() == theirs.keys(), place
        for key in theirs:
            assert_same(mine[key], theirs[key], f"{place}.{key}")
    elif isinstance(theirs, list | tuple):
        for index, pair in enumerate(zip(mine, theirs, strict=True)):
            assert_same(*pair, f"{place}.{index}")
    elif isinstance(theirs, Tensor):
        mine = torch.as_tensor(mine)  # a learning rate is a number in C++
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), place
        bytes_of = (each.contiguous().reshape(-1).view(torch.uint8) for each in (mine, theirs))
        assert torch.equal(*bytes_of), place
    else:
        assert mine == theirs, place


def assert_same_in_cpp(run: Run, scenario: Scenario, folder: Path) -> None:
    assert_same(do_in_cpp(run, scenario, folder), do(scenario))


STEPS = 120
SHAPES = (64, 64), (9,)  # with blocks of 32 elements in 8 bits, and without
KINDS: dict[str, Saved] = {name: {} for name in CLASSES} | {
    "Adam": {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-5, "max_grad_norm": 0.5},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1, "denominator_floor": 1e-6},
    "SGD": {"lr": 0.01, "momentum": 0.99, "dampening": 0.25, "clip_value": 0.125},
    "Lion": {"lr": 0.001, "betas": (0.8, 0.95), "maximize": True},
}
FORMS: dict[str, tuple[str, Saved]] = {
    "float32": ("float32", {}),
    "masters": ("bfloat16", {"state_dtype": "bfloat16"}),
    "split": ("float16", {"master_weights": "split", "state_dtype": "bfloat16"}),
    "split8": ("bfloat16", {"master_weights": "split8", "rounding": "nearest"}),
    "8bit": ("float32", {"state_dtype": "8bit"}),
    "8bit beside split": ("float16", {"master_weights": "split", "state_dtype": "8bit-bf16"}),
    "none": ("bfloat16", {"master_weights": False, "state_dtype": None, "rounding": "dither"}),
}


def steps_of(dtype: str, steps: range, between: dict[int, list[Any]]) -> list[Any]:
    """Returns calls of steps, some of which overflow and some of which unscale before the step."""
    calls: list[Any] = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        grads = [torch.randn(shape, generator=generator) / 8 for shape in SHAPES]
        calls += between.get(step, [])
        dtype = next((call[1] for call in between.get(step, []) if call[0] == "convert"), dtype)
        if step in (7, 23, 24, 60):
            grads[0][0, 0] = torch.inf
        calls.append(("scaled_grads", [grad.to(getattr(torch, dtype)) for grad in grads]))
        if step % 10 == 8 and dtype != "float16":
            calls.append(("scaler.unscale_",))
        calls += [("scaler.step",), ("scaler.update",), ("note",)]
    return calls


def run_of(
    kind: str, form: str, steps: range = range(STEPS), between: Any = None, **options: Any
) -> Scenario:
    dtype, kept = FORMS[form]
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return {
        "optimizer": kind,
        "options": {**KINDS[kind], **kept, **options},
        "groups": [{"params": [0]}, {"params": [1], "lr": 0.005}],
        "params": [weight.to(getattr(torch, dtype)) for weight in weights],
        "scaler": {"init_scale": 1024.0, "growth_interval": 20, "hysteresis": 2},
        "calls": [("scaler.scale",), *steps_of(dtype, steps, between or {})],
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_has_the_bits_of_python(run: Run, kind: str, form: str, tmp_path: Path) -> None:
    """Also of steps that go on from a file of Python, and after them from one of C++."""
    options = {"amsgrad": True} if kind == "AdamW" and "8bit" not in form else {}
    scenario = run_of(kind, form, **options)
    cpp, wholly = (do_in_cpp(run, scenario, tmp_path), do(scenario))
    assert_same(cpp, wholly)
    states = (each["optimizer"]["state"][0] for each in (cpp, wholly))
    assert [*next(states)] == [*next(states)]  # in this order
    assert max(note["scale"] for note in wholly["notes"]) > 1024.0
    torch.save(do(run_of(kind, form, range(40), **options)), tmp_path / "saved.pt")
    for steps, go_on in ((range(40, 80), do_in_cpp), (range(80, STEPS), None)):
        names = ("params", "optimizer", "scaler")
        loads = [(f"{name}.load", str(tmp_path / "saved.pt")) for name in names]
        scenario = run_of(kind, form, steps, {steps[0]: loads}, **options)
        done = do(scenario) if go_on is None else go_on(run, scenario, tmp_path)
        assert_same(done["notes"], wholly["notes"][steps[0] : steps[-1] + 1])
        torch.save(done, tmp_path / "saved.pt")


def options_from(start: int, **options: list[Any]) -> dict[int, list[Any]]:
    """Returns what a loop writes into the first group, an option after another."""
    ((name, values),) = options.items()
    return {step: [("options", {name: value})] for step, value in enumerate(values, start)}


MASTERS = ["split", True, "split8", "split", False, "split8", True, False]
MOMENTS = ["8bit", "8bit-bf16", "bfloat16", "8bit", "float32", "8bit-bf16", None, "8bit", None]
DTYPES = {4: [("convert", "float16")], 9: [("convert", "float32")], 12: [("convert", "float64")]}
STEP = [("gradient", "ones"), ("optimizer.step",)]
LIMITS = {"init_scale": 64.0, "growth_factor": 4.0, "growth_interval": 5, "backoff_factor": 0.25}
LIMITS |= {"min_scale": 32.0, "max_scale": 512.0}
CHANGES: dict[str, Scenario] = {
    **{
        f"dtypes of parameters, {form}": run_of("AdamW", form, range(18), DTYPES)
        for form in ("masters", "split8", "8bit")
    },
    "forms of masters": run_of(
        "Lion", "masters", range(12), options_from(2, master_weights=MASTERS)
    ),
    "forms of moments": run_of("SGD", "float32", range(14), options_from(4, state_dtype=MOMENTS)),
    "first momentum": run_of(
        "SGD", "masters", range(6), options_from(0, momentum=[0.0, 0.0, 0.5]), max_grad_norm=2.0
    ),
    "clipping": run_of("SGD", "float32", range(6), options_from(3, max_grad_norm=[None]))
    | {"groups": [{"params": [0, 1], "max_grad_norm": 1.0}]},
    "elements that are skipped": run_of("Adam", "8bit", range(9), skip_nonfinite=True),
    "limits of the scale": run_of("Adam", "float32", range(70)) | {"scaler": LIMITS},
    "a scale that stays": run_of("Adam", "float32", range(9)) | {"scaler": {"dynamic": False}},
    "no scale": run_of("SGD", "float32", range(3)) | {"scaler": {"enabled": False}},
    "layout": {
        "options": {"lr": 0.125, "momentum": 0.5, "state_dtype": "8bit"},
        "params": [torch.arange(2.0**12).view(32, 32, 2, 2) / 64],
        "calls": [
            call
            for to in ("contiguous", "channels_last", "contiguous")
            for call in [("convert", to), *[*STEP, ("note",)] * 2]
        ],
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_followed_as_in_python(run: Run, name: str, tmp_path: Path) -> None:
    assert_same_in_cpp(run, CHANGES[name], tmp_path)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_a_bad_call_is_refused_in_python(name: str) -> None:
    scenario, kind, text = REFUSED_CALLS[name]
    with pytest.raises(kind) as caught:
        do(scenario)
    assert caught.type is kind
    assert caught.value.args[0] == text


# C++ has no guard of the norm.
@pytest.mark.parametrize("name", [name for name in REFUSED_CALLS if "NormGuard" not in name])
def test_a_bad_call_gets_the_words_of_python(run: Run, name: str, tmp_path: Path) -> None:
    scenario, _, text = REFUSED_CALLS[name]
    with pytest.raises(AssertionError) as caught:
        do_in_cpp(run, scenario, tmp_path)
    assert comparable(str(caught.value)) == comparable(text)


# Files.


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    corpus.unpack(folder)
    return folder


@pytest.mark.parametrize("group", corpus.GROUPS)
def test_files_load_with_the_bits_of_before(
    run: Run, group: str, files: Path, tmp_path: Path
) -> None:
    loaded = 0
    for row, target, wanted in corpus.loads(group):
        paths = [*corpus.files_of(files, row, "python", "cpp", "archive", "torch")]
        # All into the configuration of the row. What they mean to another one is not said in
        # `libtorch/`, which only reads them: into each other one goes one of them, in turn.
        if target != corpus.targets_of(row)[0]:
            paths = paths[loaded % len(paths) :][:1]
        for path in paths:
            archive = path if path.is_relative_to(files / "archive") else None
            file = path if archive is None else files / "cpp" / f"{row}.pt"
            scenario = corpus.scenario_of(corpus.plan_of(row, target, file), archive)
            try:
                result = corpus.hash_of(do_in_cpp(run, scenario, tmp_path))
            except AssertionError as error:
                result = str(error).partition("\n")[0]
            loaded += 1
            assert result == wanted, f"{path} into {target}"
    assert loaded > 0


def test_files_of_others_load_as_in_python(run: Run, tmp_path: Path) -> None:
    step = {"optimizer": "AdamW", "calls": [("optimizer.step",)]}
    saved = do(step)["optimizer"]
    for group in saved["param_groups"]:  # as FusedAdam of apex and of TransformerEngine does
        group |= {"bias_correction": True, "step": 1, "kept": "by somebody"}
    for state in saved["state"].values():
        del state["step"]
    saved["param_groups"][0] |= {"lr": torch.tensor(0.25), "initial_lr": 0.75, "betas": [0.5, 0.75]}
    saved["param_groups"][0]["decoupled_weight_decay"] = False  # which AdamW has for good
    counts = {"epoch": 3, "mean": torch.full((1,), 0.5)}
    saved["state"][0] |= {"counts": counts, "note": "warm", "decay": 0.25, "nothing": None, 7: True}
    saved["state"][0] |= {"average": torch.ones(1), "master_param": None}
    saved["state"]["buckets"] = (1, 2)  # of no parameter
    scenario = {**step, "calls": [("optimizer.load_state_dict", saved), ("optimizer.step",)]}
    assert do_in_cpp(run, scenario, tmp_path)["optimizer"]["state"][0]["step"] == 2
    assert_same_in_cpp(run, scenario, tmp_path)


@pytest.mark.parametrize("package", OF_OTHERS)
def test_a_file_of_another_package_goes_on_as_in_python(
    run: Run, package: str, tmp_path: Path
) -> None:
    name, options, file, before, _ = OF_OTHERS[package]
    scenario = {
        "optimizer": name,
        "options": options,
        "params": [torch.tensor(before)],
        "calls": [("optimizer.load_state_dict", file), ("optimizer.step",)],
    }
    assert_same_in_cpp(run, scenario, tmp_path)


@pytest.mark.parametrize("name", CLASSES)
def test_options_have_the_defaults_of_python_and_are_loaded_as_there(
    run: Run, name: str, tmp_path: Path
) -> None:
    cpp = do_in_cpp(run, {"optimizer": name}, tmp_path)
    saved = do({"optimizer": name})["optimizer"]
    assert_same(cpp["optimizer"], saved)
    described = getattr(ops, getattr(optim, name)._hyperparameters_class).options
    required = {option.name for option in described if option.on_load == "required"}
    others = saved["param_groups"][0].keys() - {"params", *required}

    def outcome(make: Callable[[Scenario], Saved], file: Saved) -> Any:
        calls = [("optimizer.load_state_dict", file)]
        try:
            return make({"optimizer": name, "options": {"maximize": True}, "calls": calls})
        except (AssertionError, RuntimeError, ValueError) as error:
            return comparable(str(error))

    for lacking in (others, *({option} for option in required)):
        file = copy.deepcopy(saved)
        for option in lacking:
            del file["param_groups"][0][option]
        cpp = outcome(lambda scenario: do_in_cpp(run, scenario, tmp_path), file)
        assert_same(cpp, outcome(do, file))


def test_files_of_a_gpu_are_read(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    do_in_cpp(run, {"nothing": torch.ones(0)}, tmp_path)


def test_files_that_cpp_can_not_read_are_explained(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "scenario.pt"
    torch.save({"model": torch.nn.Linear(2, 2).state_dict()}, path)
    not_one = f"load_state of {path}: the file is damaged, or torch.save did not"
    for content, words in (
        (path.read_bytes(), re.escape("torch.save(dict(model.state_dict()), path)")),
        (b"not a checkpoint", not_one),
        (path.read_bytes()[:-64], not_one),
    ):
        path.write_bytes(content)
        with pytest.raises(AssertionError, match=words):
            run("do", str(tmp_path))
    path.unlink()
    with pytest.raises(AssertionError, match="path must be of a file that can be read, got"):
        run("do", str(tmp_path))


def test_what_a_link_names_is_replaced_and_keeps_its_mode(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run.pt").symlink_to("last.pt")
    for _ in range(2):  # the first where no file is yet
        run("save", str(tmp_path / "run.pt"))
        assert sorted(os.listdir(tmp_path)) == ["last.pt", "run.pt"]
        assert (tmp_path / "run.pt").is_symlink()
        assert torch.load(tmp_path / "last.pt") == "text"
        (tmp_path / "last.pt").chmod(0o640)
    assert (tmp_path / "last.pt").stat().st_mode & 0o777 == 0o640


def test_a_file_that_can_not_be_written_is_named(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, words in (
        ("missing/run.pt", "missing/run.pt: No such file or directory"),
        ("pipe", "save_state: path must be of a file, or of nothing yet, got a pipe: "),
    ):
        with pytest.raises(AssertionError, match=words):
            run("save", str(tmp_path / name))
    assert os.listdir(tmp_path) == ["pipe"]
