"""Modules that the tests share: `from harness.rows import rows`.

Inputs and expected results:

* `edge_shapes`: sizes, layouts and dtypes that kernels often get wrong.
* `edge_numbers`: steps over values at the limits of number formats and formulas.
* `rows`: a helper that writes the cases of parametrized tests as a table.
* `reference`: the formulas of the optimizers in plain torch float64, and tolerances.
* `number_codes`: quantization of low-memory states in plain torch.
* `hashes`: values that are the same on every machine, and hashes of results.

Tables of test cases:

* `list_operations`: the optimizers' operations on lists of tensors (`OPERATIONS`, `STEPS`).
* `coded_lists`: the tensor lists of a step whose moments are quantized to 8 bits.
* `gradient_lists`: operations on lists of gradients.
* `engine_results`: a case for every kernel, to compare the engines bit by bit.
* `optimizer_cases`: the optimizers (`KINDS`, `OPTIMIZERS`), their parameters and gradients.
* `clipping_cases`: clipping inside the step and as a separate call.
* `guard_rules`: the decisions of NormGuard in plain Python.
* `scaler_cases`: scalers, and a helper that steps optimizers under them.
* `trainer_cases`: small training runs and their parts.
* `ranks`: processes of distributed training; `tests/distributed/rank_checks_*.py` are the checks of
  each rank.

Injected failures:

* `launch_failures`: kernel launches that fail.

The packages and programs `state_machine`, `cuda_emulator`, `checkpoint_corpus` and `gpu_cases` are
in the parent folder.
"""

#: Seconds after which a process counts as hanging. The limit is high, so that no test fails because
#: the machine is slow or busy.
HANGS = 3600
