"""What is kept on disk: tensors and JSON, never pickle."""
