"""What tests share: `from harness.rows import rows`.

Rows, and what results are held against:

* `edge_shapes`: sizes, layouts and dtypes that kernels get wrong.
* `rows`: rows of parametrized tests as a table.
* `reference`: the formulas of the optimizers in plain torch float64, and tolerances.
* `number_codes`: the codes of low-memory states in plain torch.
* `hashes`: numbers that are the same on every machine, and hashes of what comes of them.

What is tested, in tables:

* `list_operations`: the optimizers' operations over lists of tensors (`OPERATIONS`, `STEPS`).
* `coded_lists`: lists of a step whose moments have codes of 8 bits.
* `gradient_lists`: the operations over lists of gradients.
* `engine_results`: a case of every kernel, for comparison between engines.
* `optimizer_cases`: the optimizers (`KINDS`, `OPTIMIZERS`), their parameters and gradients.
* `clipping_cases`: clipping inside the step and apart from it.
* `guard_rules`: what a guard of norms decides, in Python.
* `scaler_cases`: scalers, and one way to step the optimizers under them.
* `trainer_cases`: small trainings and their parts.
* `ranks`: ranks of distributed training, and what each checks there.
* `call_scenarios`: calls as plain values, which Python and C++ do alike.
* `refused_calls`: calls that Python and C++ refuse alike, with the exception and its text.

What goes wrong on purpose:

* `launch_failures`: launches and copies that are refused.
* `interrupts`: Ctrl-C at each line of a call.
* `disk`: a disk on which a save ends in the middle.

Packages and programs of their own stand beside this one: `state_machine`, `cuda_emulator`,
`checkpoint_corpus`, `gpu_cases`.
"""

#: Seconds after which a process counts as hanging. It is far away, so that no test fails because
#: the machine is slow or busy.
HANGS = 3600
