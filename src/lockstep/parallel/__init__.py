"""How ranks share the work of a step."""
