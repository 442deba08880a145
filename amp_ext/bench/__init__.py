"""Times amp_ext's scaler and optimizers against torch's: ``python -m amp_ext.bench``."""
