"""`lockstep doctor`."""
