"""`lockstep compare`: strategies and numbers of processes, measured under equal conditions."""
