"""What is recorded: each module has `install(plan)`, which patches torch and emits events."""
