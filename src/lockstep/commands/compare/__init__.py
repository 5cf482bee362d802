"""`lockstep compare`."""
