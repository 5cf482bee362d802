"""Names of libraries' functions and methods, by what they do to the object that they are called on, or given."""

# methods that so many objects have that a local one of the same name need not be meant
COMMON = {
    "add",
    "all_reduce",
    "append",
    "apply",
    "backward",
    "barrier",
    "close",
    "cuda",
    "eval",
    "forward",
    "get",
    "item",
    "items",
    "load",
    "load_state_dict",
    "log",
    "mean",
    "print",
    "reset",
    "save",
    "set_epoch",
    "size",
    "split",
    "state_dict",
    "step",
    "sum",
    "to",
    "train",
    "update",
    "write",
    "zero_grad",
}

# methods and functions whose result is the object that they are given, as far as a rule asks
SAME = {
    "to",
    "cuda",
    "cpu",
    "half",
    "float",
    "double",
    "bfloat16",
    "train",
    "eval",
    "requires_grad_",
    "apply",
    "share_memory",
    "compile",
    "convert_sync_batchnorm",
    "convert_syncbn_model",
    "auto_model",
    "auto_optim",
    "DistributedOptimizer",
    "iter",
    "cycle",
    "MpDeviceLoader",
    "device_loader",
}

# those that hand back what they are given, in the same order, fit for several processes
PREPARE = {
    "prepare",
    "setup",
    "setup_dataloaders",
    "setup_module",
    "setup_optimizers",
    "prepare_model",
    "prepare_data_loader",
    "prepare_optimizer",
    "prepare_scheduler",
    "initialize",
}

PREPARE_LOADERS = ("prepare", "setup_dataloaders", "prepare_data_loader")  # those of them that take loaders
