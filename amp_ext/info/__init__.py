"""What this amp_ext is, whether it works, and what to type if not: ``python -m amp_ext.info``."""
