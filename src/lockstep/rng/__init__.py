"""Random draws of a model's forward pass, keyed by sample: dropout, stochastic depth, noise."""
