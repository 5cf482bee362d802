"""`lockstep tune`."""
