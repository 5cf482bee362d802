"""`lockstep verify`."""
