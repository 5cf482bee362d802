"""What is read out of a program: names, values, calls, conditions, ranks, loops."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from lockstep_lint.facts.modules import Project
from lockstep_lint.facts.ranks import alone, guard
from lockstep_lint.facts.training import Facts, for_evaluation, for_training
from lockstep_lint.facts.tree import argument, dotted_name, ends, last_name, literal, words


def facts(tmp_path: Path, text: str, files: dict[str, str] | None = None) -> Facts:
    """The facts of train.py beside other files."""
    for name, content in {"train.py": text, **(files or {})}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    project = Project([tmp_path])
    module = project.load(tmp_path / "train.py", "train.py")
    assert module is not None
    return Facts(project, module)


def values(found: Facts, name: str = "show") -> set[str]:
    """What the argument of the call `show(...)` may be, as texts."""
    call, scope = next(iter(found.calls(name)))
    return {ast.unparse(each.expr) for each in found.sources(call.args[0], scope)}


def guards(found: Facts) -> list[bool | None]:
    """The guard of each call `show()` by its line."""
    calls = sorted(found.calls("show"), key=lambda each: each[0].lineno)
    return [guard(found, call, scope) for call, scope in calls]


def test_small_questions_about_a_tree() -> None:
    def expression(text: str) -> ast.expr:
        return ast.parse(text, mode="eval").body

    call = expression("a.b(1, c=2)")
    assert isinstance(call, ast.Call)
    assert (last_name(call), last_name(expression("a.b[0]")), last_name(expression("1"))) == ("b", "b", "")
    assert (dotted_name(expression("a.b.c")), dotted_name(expression("a().b"))) == ("a.b.c", "")
    assert (literal(expression("-1")), literal(expression("'x'")), literal(expression("a"))) == (-1, "x", None)
    assert literal(argument(call, 0, "z")) == 1
    assert literal(argument(call, 1, "c")) == 2
    assert argument(call, 2, "z") is None
    assert argument(expression("f(*a, 1)"), 1, "z") is None  # type: ignore[arg-type]
    assert words(call, None) == {"a", "b", "c"}
    assert [ends(ast.parse(text).body) for text in ("sys.exit()", "f()", "raise E")] == [True, False, False]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x = 1\nshow(x)", "1"),
        ("a, b = 1, 2\nshow(b)", "2"),
        ("x = 1\ny = x if x else 2\nshow(y)", "2"),
        ("def f():\n    return 1, 2\na, b = f()\nshow(b)", "2"),
        ("def f(x):\n    show(x)\nf(3)", "3"),
        ("def f(a, x=4):\n    show(x)\nf(3)", "4"),
        ("def f(rank, x):\n    show(x)\nmp.spawn(f, args=(5,))", "5"),
        ("def f(x):\n    show(x)\nProcess(target=f, args=(5,)).start()", "5"),
        (
            "class A:\n    def __init__(self, x):\n        self.x = x\n    def f(self):\n        show(self.x)\nA(6)",
            "6",
        ),
        ("class A:\n    def __init__(self):\n        self.x = 7\na = A()\nshow(a.x)", "7"),
        ("class B:\n    x = 8\nclass A(B):\n    def f(self):\n        show(self.x)\nA().f()", "8"),
        ("args.gpu = 9\ndef f(args):\n    show(args.gpu)\nf(args)", "9"),
        ("m, l = accelerator.prepare(model, loader)\nshow(l)", "loader"),
        ("x = net.to('cuda').train()\nshow(x)", "net"),
        ("x = {'a': one, 'b': two}\nshow(x['b'])", "two"),
        ("with opened() as x:\n    show(x)", "opened()"),
        ("x = one or two\nshow(x)", "two"),
    ],
)
def test_values_are_followed(tmp_path: Path, text: str, value: str) -> None:
    assert value in values(facts(tmp_path, text))


def test_a_later_value_does_not_count_and_circles_end(tmp_path: Path) -> None:
    assert "2" not in values(facts(tmp_path, "x = 1\nshow(x)\nx = 2"))
    assert values(facts(tmp_path, "x = y\ny = x\nshow(x)")) == {"x", "y"}
    assert values(facts(tmp_path, "def f(x):\n    f(x)\n    show(x)\nf(1)")) == {"x", "1"}


MAKE = "def make():\n    show(1)"
THING = "class Thing:\n    def unusual(self):\n        show(1)\nthing = Thing()"


@pytest.mark.parametrize(
    ("text", "files"),
    [
        ("from data import make\nmake()", {"data.py": MAKE}),
        ("import data\ndata.make()", {"data.py": MAKE}),
        ("import a.data\na.data.make()", {"a/data.py": MAKE}),
        ("from a import make as m\nm()", {"a/__init__.py": "from .data import make", "a/data.py": MAKE}),
        ("from a.b import *\nmake()", {"a/b.py": "from .c import make", "a/c.py": MAKE}),
        ("from a.b import Thing\nThing().unusual()", {"a/b.py": THING}),
        ("from a import b\nb.run()", {"a/b.py": "from ..c import make\ndef run():\n    make()", "c.py": MAKE}),
        ("from pkg.b import make\nmake()", {"src/pkg/__init__.py": "", "src/pkg/b.py": MAKE}),
        ("from util import thing\ndef f(x):\n    x.unusual()\nf(thing)", {"util.py": THING}),
    ],
)
def test_imports_of_local_files_are_followed(tmp_path: Path, text: str, files: dict[str, str]) -> None:
    assert len(list(facts(tmp_path, text, files).calls("show"))) == 1


def test_what_nobody_calls_is_not_reached(tmp_path: Path) -> None:
    text = "from data import a\ndef unused():\n    show(1)\na()\nif __name__ == '__main__':\n    show(2)"
    other = "def a():\n    pass\ndef b():\n    show(3)\nif __name__ == '__main__':\n    show(4)"
    assert [literal(call.args[0]) for call, _ in facts(tmp_path, text, {"data.py": other}).calls("show")] == [2]


PROPERTY = """
class Trainer:
    @property
    def writes(self):
        return rank == 0

    def run(self):
        if self.writes:
            show()

Trainer().run()
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("if rank == 0:\n    show()", True),
        ("if rank != 0:\n    show()", False),
        ("if not rank:\n    show()", True),
        ("if not args.no_cuda:\n    show()", None),
        ("args.cuda = not args.no_cuda and torch.cuda.is_available()\nif args.cuda:\n    show()", None),
        ("if rank:\n    show()", False),
        ("if args.local_rank in [-1, 0]:\n    show()", True),
        ("if cfg['rank'] == 0:\n    show()", True),
        ("if args.local_rank != -1:\n    show()", None),
        ("if rank >= 0:\n    show()", None),
        ("if not args.distributed or args.rank % n == 0:\n    show()", True),
        ("if int(os.environ['RANK']) == 0 and verbose:\n    show()", True),
        ("if dist.get_rank() == 0:\n    pass\nelse:\n    show()", False),
        ("if accelerator.is_main_process:\n    show()", True),
        ("main = hvd.rank() == 0\nif main:\n    show()", True),
        ("def is_zero():\n    return dist.get_rank() == 0\nif is_zero():\n    show()", True),
        ("def is_master():\n    return dist.get_rank() == 0\nif is_master:\n    show()", None),
        ("writer = SummaryWriter() if rank == 0 else None\nif writer is not None:\n    show()", True),
        ("show() if rank == 0 else None", True),
        ("rank == 0 and show()", True),
        ("def f():\n    if rank != 0:\n        return\n    show()\nf()", True),
        ("def f():\n    if rank != 0:\n        raise ValueError\n    show()\nf()", None),
        ("@rank_zero_only\ndef f():\n    show()\nf()", True),
        ("def f():\n    show()\nif rank == 0:\n    f()", True),
        ("def f():\n    show()\nif rank == 0:\n    f()\nf()", None),
        ("for epoch in range(9):\n    if rank:\n        continue\n    show()", True),
        ("if debug:\n    show()", None),
        ("if 0 == rank:\n    show()", True),
        ("if rank < 1:\n    show()", True),
        ("if rank > 0:\n    show()", False),
        ("if rank not in (0,):\n    show()", False),
        ("if rank == -1:\n    show()", None),
        ("if rank != -1:\n    show()", None),
        ("if int(args.rank) == 0:\n    show()", True),
        ("if os.environ.get('LOCAL_RANK', '0') == '1':\n    show()", None),
        ("if int(os.getenv('SLURM_PROCID')) == 0:\n    show()", True),
        ("if int(os.environ['EPOCHS']) == 0:\n    show()", None),
        ("if cfg['epoch'] == 0:\n    show()", None),
        ("if rank + offset == 0:\n    show()", None),
        ("if epoch % 2 == 0:\n    show()", None),
        ("if gpu == 0:\n    show()", True),
        ("if device == 0:\n    show()", True),
        ("if device == 'cuda':\n    show()", None),
        ("if device != other:\n    show()", None),
        ("r = dist.get_rank()\nif r == 0:\n    show()", True),
        ("r = count\nif r == 0:\n    show()", None),
        ("first = is_main_process()\nif first:\n    show()", True),
        ("first = compute()\nif first:\n    show()", None),
        ("if rank == 0:\n    writer = SummaryWriter('log')\nif writer:\n    show()", True),
        ("writer = SummaryWriter('log')\nif writer:\n    show()", None),
        ("log = open('log') if rank == 0 else None\nif log is None:\n    show()", False),
        ("best = one if rank == 0 else two\nif best:\n    show()", None),
        ("if x > None:\n    show()", None),
        ("if (first := rank == 0):\n    show()", True),
        ("while rank == 0:\n    show()", True),
        ("rank != 0 or show()", True),
        (PROPERTY, True),
    ],
)
def test_who_runs_a_line(tmp_path: Path, text: str, expected: bool | None) -> None:
    assert guards(facts(tmp_path, text)) == [expected]


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("not args.distributed", True),
        ("world_size == 1", True),
        ("args.local_rank == -1", True),
        ("args.dist == 'OFF'", True),
        ("not cfg['DDP']", True),
        ("world_size > 1", False),
        ("dist.is_initialized()", False),
        ("rank == 0", False),
        ("epochs == 1", False),
        ("world_size <= 1", True),
        ("world_size != 1", False),
        ("local_rank is None", True),
        ("local_rank is not None", False),
        ("args.launcher == 'none'", True),
        ("args.launcher != 'none'", False),
        ("args.launcher == 'pytorch'", False),
        ("args.mode == 'none'", False),
        ("rank >= 0", False),
        ("not (args.distributed and more)", True),
        ("not several", True),
    ],
)
def test_lines_of_one_process(tmp_path: Path, test: str, expected: bool) -> None:
    found = facts(tmp_path, f"several = world_size > 1\nif {test}:\n    show()")
    call, scope = next(iter(found.calls("show")))
    assert alone(found, call, scope) is expected


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("import torch.distributed as dist\ndist.init_process_group('nccl')", {"torch"}),
        ("import torch.distributed as dist\nif many:\n    dist.init_process_group('nccl')", set()),
        ("import torch.distributed as dist\ndef unused():\n    dist.init_process_group('nccl')\nx()", set()),
        ("import horovod.torch as hvd\nhvd.init()", {"horovod"}),
        ("from accelerate import Accelerator\nAccelerator()", {"accelerate"}),
        ("from lightning.fabric import Fabric\nFabric(devices=2)", {"fabric"}),
        ("import lightning as L\nL.Trainer(devices=2)", {"lightning"}),
        ("import lightning as L\nL.Trainer(devices=1)", set()),
        ("import deepspeed\ndeepspeed.initialize(model)", {"deepspeed"}),
        ("import torch\nmodel.init()", set()),
        ("from net import init_distributed_mode\ninit_distributed_mode(a)\nm = DistributedDataParallel(m)", {"torch"}),
        ("from net import init_distributed_mode\ninit_distributed_mode(a)", set()),
        ("import lightning as L\nL.Trainer(strategy='ddp' if n > 1 else None)", {"lightning"}),
        ("import lightning as L\nL.Trainer(strategy='auto', gpus=-1)", {"lightning"}),
        ("import transformers\ntransformers.Trainer(devices=4)", set()),
    ],
)
def test_by_what_processes_are_run(tmp_path: Path, text: str, kinds: set[str]) -> None:
    assert facts(tmp_path, text).kinds == kinds


LOOPS = """
def step(batch):
    loss = model(batch)
    loss.backward()

def epoch(loader):
    for batch in tqdm(enumerate(loader)):
        step(batch)

def test(loader):
    with torch.no_grad():
        for batch in loader:
            total += model(batch)

train_loader = DataLoader(train_set, batch_size=2)
for number in range(9):
    epoch(train_loader)
    test(DataLoader(test_set))
"""


def test_loops_and_their_loaders(tmp_path: Path) -> None:
    found = facts(tmp_path, LOOPS)
    (loop,) = found.step_loops
    assert (loop.node.lineno, loop.backward.lineno) == (7, 4)
    assert [epochs.lineno for epochs, _ in found.epoch_loops(loop)] == [16]
    assert [ast.unparse(each.call) for each in found.loaders_of(loop.node, loop.scope)[0]] == [
        "DataLoader(train_set, batch_size=2)"
    ]
    ((evaluation, scope),) = found.evaluation_loops
    assert evaluation.lineno == 12
    assert [ast.unparse(each.call) for each in found.loaders_of(evaluation, scope)[0]] == ["DataLoader(test_set)"]


@pytest.mark.parametrize(
    ("loop", "found"),
    [
        ("with torch.no_grad():\n    for x in loader:\n        total += model(x)", True),
        ("for x in loader:\n    with torch.inference_mode():\n        total += model(x)", True),
        ("@torch.no_grad()\ndef run():\n    for x in loader:\n        total += model(x)\nrun()", True),
        ("def run():\n    model.eval()\n    for x in loader:\n        total += model(x)\nrun()", True),
        ("def test():\n    for x in loader:\n        total += model(x)\ntest()", True),
        ("def run():\n    for x in loader:\n        total += model(x)\nrun()", False),
        ("with torch.no_grad():\n    for x in loader:\n        total += other(x)", False),
        ("with torch.no_grad():\n    for x in range(3):\n        total += model(x)", False),
        ("def model(x):\n    pass\nwith torch.no_grad():\n    for x in loader:\n        total += model(x)", False),
    ],
)
def test_which_loops_evaluate(tmp_path: Path, loop: str, found: bool) -> None:
    assert bool(facts(tmp_path, loop).evaluation_loops) is found


@pytest.mark.parametrize(
    ("name", "training", "evaluation"),
    [
        ("train_loader", True, False),
        ("valLoader", False, True),
        ("testing_set", False, True),
        ("train_val", False, False),
        ("latest", False, False),
        ("loader", False, False),
    ],
)
def test_what_names_say(name: str, training: bool, evaluation: bool) -> None:
    assert (for_training(name), for_evaluation(name)) == (training, evaluation)


def test_constants_of_options(tmp_path: Path) -> None:
    text = "p.add_argument('--accum-steps', default=1)\np.add_argument('--save', action='store_true')\n"
    text += "show(a.accum_steps)\nshow(a.save)\nshow(a.other)"
    found = facts(tmp_path, text)
    assert [found.constant(call.args[0], scope) for call, scope in found.calls("show")] == [1, False, ...]
