"""`lockstep launch-script`."""
