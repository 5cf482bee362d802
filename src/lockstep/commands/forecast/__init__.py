"""`lockstep forecast`."""
