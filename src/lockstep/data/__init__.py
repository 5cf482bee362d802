"""Images: sources, augmentation, loaders."""
