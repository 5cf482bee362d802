"""The same training task, done by Lockstep and by others. Each side is a module with `build(task) -> Side`."""

# side -> what must be importable for it, beside torch, torchvision and lockstep
NEEDS = {
    "raw": "torch",
    "kept": "lockstep",
    "tutorial": "torchvision",
    "lockstep": "lockstep",
    "fit": "lockstep",
    "bar": "lockstep",
    "ignite": "ignite",
    "fabric": "lightning",
    "lightning": "lightning",
    "accelerate": "accelerate",
    "timm": "timm",
}
