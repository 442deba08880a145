"""Shows the installation, whether it works, and how to repair it: ``python -m amp_ext.info``."""
