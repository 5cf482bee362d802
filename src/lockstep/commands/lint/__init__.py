"""`lockstep lint`: what a training script does to its result, found without running it."""
