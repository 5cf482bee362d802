"""One step, one epoch, one run."""
