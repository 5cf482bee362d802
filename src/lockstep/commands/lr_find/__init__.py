"""`lockstep lr-find`: a range test of the learning rate."""
