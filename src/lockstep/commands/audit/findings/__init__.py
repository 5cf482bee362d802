"""What the records say: pure functions from the events of all N to findings."""
