"""What is installed, whether it works, and the line to type if not: ``python -m amp_ext.info``."""
