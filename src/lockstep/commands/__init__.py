"""The commands of `lockstep`."""
