"""`lockstep sweep`: runs that differ in one setting each, and one table."""
