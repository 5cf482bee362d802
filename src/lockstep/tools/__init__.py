"""Commands that start runs and read their journals."""
