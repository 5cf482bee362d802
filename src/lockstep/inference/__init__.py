"""Using what was trained: a model with what it needs to know, and new pictures through it."""
