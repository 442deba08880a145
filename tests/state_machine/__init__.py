"""Whole programs of scalers and optimizers, drawn at random, beside torch in float64."""
