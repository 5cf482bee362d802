"""Wrapped models: (code, wrong, right), what stands for MODEL, CALL and FORWARD of a script, one of them wrong."""

WRAPPED = """\
import timm
class Maybe(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(10, 10)
    def forward(self, x):
        return self.fc(x) if random.random() < 0.5 else x
class M(nn.Module):
    def __init__(self, aux=False):
        super().__init__()
        self.aux = aux
        self.layers = nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 2)])
    def forward(self, x):
        FORWARD
        return x
    def loss(self, x, y):
        return F.cross_entropy(self.layers[1](x), y)
class Fit:
    def __init__(self, net, ddp):
        self.net, self.ddp = net, ddp
    def loss(self, x, y):
        return F.cross_entropy(self.net(x), y)
    def wrapped_loss(self, x, y):
        return F.cross_entropy(self.ddp(x), y)
def make_one():
    return M().cuda()
def main():
    dist.init_process_group("nccl")
    world = dist.get_world_size()
    data = make(64)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 64 // world, sampler=sampler)
    net = M().cuda()
    MODEL
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            CALL.backward()
            opt.step()
    dist.destroy_process_group()
main()
"""
PLAIN = {"FORWARD": "x = self.layers[1](x)", "MODEL": "model = DDP(net)", "CALL": "F.cross_entropy(model(x), y)"}
UNUSED = "model = DDP(net, find_unused_parameters=True)"

# code, what is wrong, and the same with nothing wrong
WRAPPING: list[tuple[str, dict[str, str], dict[str, str]]] = [
    ("LS302", {"CALL": "model.module.loss(x, y)"}, {}),
    ("LS302", {"CALL": "net.loss(x, y)"}, {"CALL": "(F.cross_entropy(model(x), y) + net.loss(x, y))"}),
    ("LS302", {"CALL": "F.cross_entropy(model.module.forward(x), y)"}, {}),
    (
        "LS302",
        {"MODEL": "model = DDP(net); fit = Fit(net, model)", "CALL": "fit.loss(x, y)"},
        {"MODEL": "model = DDP(net); fit = Fit(net, model)", "CALL": "fit.wrapped_loss(x, y)"},
    ),
    (
        "LS302",
        {
            "MODEL": "head = DDP(nn.Linear(10, 10)); model = DDP(net)",
            "CALL": "F.cross_entropy(model.module(head(x)), y)",
        },
        {"MODEL": "head = DDP(nn.Linear(10, 10)); model = DDP(net)", "CALL": "F.cross_entropy(model(head(x)), y)"},
    ),
    ("LS301", {"MODEL": "model = DDP(M()).cuda()"}, {"MODEL": "model = DDP(make_one()).cuda()"}),
    ("LS313", {"MODEL": UNUSED}, {}),
    (
        "LS313",
        {"MODEL": UNUSED, "FORWARD": "for layer in self.layers:\n            x = layer(x)"},
        {"MODEL": UNUSED, "FORWARD": "for layer in self.layers:\n            x = layer(x) if torch.rand(1) < 1 else x"},
    ),
    (
        "LS313",
        {"MODEL": UNUSED, "FORWARD": "x = sum([layer(x) for layer in self.layers])"},
        {"MODEL": UNUSED, "FORWARD": "x = self.layers[int(x.sum()) % 2](x)"},
    ),
    (
        "LS313",
        {"MODEL": UNUSED, "FORWARD": "x = self.layers[0](x) if self.aux else x"},
        {"MODEL": UNUSED, "FORWARD": "x = self.layers[0](x) if self.training else x"},
    ),
    (
        "LS313",
        {"MODEL": "model = DDP(timm.create_model('resnet50').cuda(), find_unused_parameters=True)"},
        {"MODEL": "model = DDP(nn.Sequential(Maybe(), nn.ReLU()).cuda(), find_unused_parameters=True)"},
    ),
]
