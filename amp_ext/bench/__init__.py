"""The benchmark of scalers and optimizers, ours beside torch's: ``python -m amp_ext.bench``."""
