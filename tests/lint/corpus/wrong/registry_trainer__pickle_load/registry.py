# expect: none
"""Names in a config file and what they build."""
import torch
import torchvision


class Registry(dict):
    def register(self, name):
        def add(function):
            if name in self:
                raise KeyError(f'{name} is registered already')
            self[name] = function
            return function
        return add


MODELS = Registry()
OPTIMIZERS = Registry()


@MODELS.register('resnet50')
def resnet50(num_classes):
    return torchvision.models.resnet50(weights=None, num_classes=num_classes, zero_init_residual=True)


@MODELS.register('regnet')
def regnet(num_classes):
    return torchvision.models.regnet_y_3_2gf(weights=None, num_classes=num_classes)


@OPTIMIZERS.register('sgd')
def sgd(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-4, nesterov=True)


@OPTIMIZERS.register('adamw')
def adamw(parameters, lr):
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.05)
