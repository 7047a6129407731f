"""`holdfast chaos`.

What is planted in a training is found and named, and of one that is exact nothing is said.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.prepared import WITHOUT_HOLDFAST, Prepared
from typer.testing import CliRunner

from holdfast.chaos import trials
from holdfast.chaos.campaign import Campaign, check_survives
from holdfast.cli import chaos as cli
from holdfast.cli.main import make_app
from holdfast.core.errors import PolicyError

_PROGRAMS = Path(__file__).parents[2] / "evals" / "chaos" / "programs"
_RANKS = """
import os, sys, time, torch
ranks = []
for rank in range(2):
    if (child := os.fork()) == 0:
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), "2"
        break
    ranks.append(child)
else:
    for _ in ranks:
        if os.wait()[1]:
            [os.kill(child, 9) for child in ranks]
            sys.exit(1)
    sys.exit()
torch.manual_seed(0)
weight, file = torch.nn.Parameter(torch.randn(3)), f"rank{rank}.pt"
optimizer, first = torch.optim.SGD([weight], 0.1), 0
if os.path.exists(file):
    saved = torch.load(file)
    weight.data, first = saved["weight"], saved["step"]
for step in range(first, 8):
    while rank and not os.path.exists(f"step{step}"):
        time.sleep(0.01)
    loss = (weight * (step + 1 + rank * (first if "planted" in sys.argv else 0))).square().sum() / 100
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.save({"weight": weight.data, "step": step + 1}, file + ".tmp")
    os.replace(file + ".tmp", file)
    open(f"step{step}", "w").close()
os._exit(0)
"""


def forking(**settings):
    """Return what trials use of `subprocess`, with commands that are forked; see `Prepared`."""
    return SimpleNamespace(
        Popen=lambda command, **given: Prepared(command[7:], **settings, **given),
        **{
            name: getattr(subprocess, name)
            for name in ("DEVNULL", "PIPE", "STDOUT", "TimeoutExpired")
        },
    )


@pytest.fixture(autouse=True)
def _forked(monkeypatch):
    """Let commands be forked from a process that has torch loaded."""
    monkeypatch.setattr(trials, "subprocess", forking())
    monkeypatch.setattr(cli, "adopt_orphans", lambda: None)  # this process has other children


@pytest.fixture
def origin(tmp_path):
    """Return a working directory with a file in it that a training would go on from."""
    (tmp_path / "notes.txt").write_text("mine")
    return tmp_path


def command(name, *arguments):
    return [sys.executable, str(_PROGRAMS / f"{name}.py"), *arguments]


def tried(words, origin, *only):
    return Campaign(words, origin=origin, only=only, seed=3, restarts=2).run()


def cause(row):
    """Return in what a training is another one, else what became of it."""
    if row.result not in ("another training", "work is lost"):
        return row.result
    causes = [difference["what"] for difference in row.comparison["differences"]]
    # An older checkpoint is the cause only if nothing else differs.
    return next((cause for cause in causes if cause != "older"), "older")


def test_of_a_training_that_resumes_exactly_nothing_is_said(origin):
    """Asked to end, killed in a save, with damaged files, without memory.

    It is the same, and no file is touched.
    """
    before = {path: path.read_bytes() for path in origin.rglob("*") if path.is_file()}
    kinds = ("term", "save", "eval", "memory", "disk", "damage")
    report = tried(command("classifier", "+checked"), origin, *kinds)
    assert {row.kind for row in report.rows} == set(kinds)
    assert [
        (row.fault, row.result, row.detail) for row in report.rows if row.result != "exact"
    ] == []
    assert report.passed
    assert report.unsteady is None
    assert {path: path.read_bytes() for path in origin.rglob("*") if path.is_file()} == before
    assert sum(row.comparison["steps_again"] for row in report.rows) > 0


@pytest.mark.parametrize(
    ("program", "planted", "kind", "expected_result", "expected_cause"),
    [
        ("classifier", "optimizer state dropped", "term", "another training", "optimizer"),
        ("classifier", "epoch repeated", "term", "another training", "batch"),
        ("classifier", "written in place", "save", "does not survive", "does not survive"),
        ("classifier", "older checkpoint", "kill", "work is lost", "older"),
        ("language", "EMA not saved", "term", "another training", "saved"),
        ("language", "numpy state not saved", "term", "another training", "random"),
        ("language", "weight of the loss not saved", "term", "another training", "losses"),
        ("classifier", "", "nan", "ends in NaN", "ends in NaN"),
    ],
)
def test_a_planted_loss_is_found_and_named(
    origin, program, planted, kind, expected_result, expected_cause
):
    """What is said first is what was planted."""
    report = tried(command(program, planted), origin, kind)
    assert not report.passed
    assert (expected_result, expected_cause) in [(row.result, cause(row)) for row in report.rows]


def test_a_model_is_copied_and_pickled_as_without_us(origin):
    """An average made by `deepcopy`, and a model saved whole, come out exactly, through open
    files too.
    """
    (origin / "train.py").write_text(
        "import copy, os, torch\ntorch.manual_seed(0)\nfirst, model = 0, torch.nn.Linear(3,"
        " 1)\ntorch.serialization.add_safe_globals([torch.nn.Linear])\nif"
        " os.path.exists('model.pt'):\n    first, model = torch.load('model.pt',"
        " weights_only=True)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\naverage ="
        " copy.deepcopy(model)\nfor step in range(first, 6):\n    model(torch.ones(2, 3) *"
        " step).square().mean().backward()\n    average(torch.ones(1, 3))\n    optimizer.step()\n  "
        "  optimizer.zero_grad()\n    with open('new.pt', 'wb') as file:\n        torch.save([step"
        " + 1, model], file)\n    os.replace('new.pt', 'model.pt')\n"
    )
    report = tried([sys.executable, "train.py"], origin, "term", "save")
    assert [(row.kind, row.result) for row in report.rows] == [
        ("term", "exact"),
        *[("save", "exact")] * 2,
    ]


_TWO = """
import os, pickle, sys, torch
torch.manual_seed(0)
models = [torch.nn.Linear(3, 1) for _ in range(2)]
class Settings(dict):  # any attribute is an entry
    __getattr__ = dict.get
models[0].average = torch.nn.Parameter(torch.zeros(1), requires_grad=False)  # as MoCo has it
optimizers = [torch.optim.Adam(model.parameters(), 0.1) for model in models]
models[1].register_forward_pre_hook(lambda _, given: (given[0] * 2,))  # after ours
first, average = 0, torch.zeros(1)
if os.path.exists("last.pt"):
    first, random, *states = torch.load("last.pt").values()
    for number, (each, state) in enumerate(zip(models + optimizers, states)):
        if sys.argv[1] != str(number):
            each.load_state_dict(state)
    if sys.argv[1] != "average":
        average = torch.load("average/last.pt", weights_only=False)["generator"]
    if sys.argv[1] != "random":
        torch.set_rng_state(random)
for step in range(first, 7):
    with torch.no_grad():
        models[0].weight.clamp_(-1, 1)  # as a critic's of WGAN
    for model, optimizer in zip(models, optimizers):
        models[0].average += models[0].bias.detach()
        inputs = [torch.ones(2, 3) * (step + 1)] * int(torch.randint(2, 6, ()))
        loss = sum(model(each).square().mean() for each in inputs)
        for p, p.grad in zip([model.weight, model.bias], torch.autograd.grad(loss, [model.weight, model.bias])):
            pass
        optimizer.step()
        pickle.dumps(model.weight)
    if step % 3 == 0:
        average = average + models[0].bias.detach()
        states = [each.state_dict() for each in models + optimizers]
        os.makedirs("average", exist_ok=True), torch.save(Settings({"generator": average}), "average/last.pt")
        torch.save(dict(zip("abcdef", [step + 1, torch.get_rng_state(), *states])), "new.pt")
        os.replace("new.pt", "last.pt")
        torch.jit.script(models[0])
"""


@pytest.mark.parametrize(
    ("planted", "expected_cause", "noun"),
    [
        ("", "exact", ""),
        ("0", "optimizer", "step 0"),
        ("1", "weights", "the optimizer of step"),
        ("2", "optimizer", "at the start"),
        ("3", "optimizer", "the optimizer of step"),
        ("random", "random", "torch"),
        ("average", "saved", "average/last.pt differs in 'generator'"),
    ],
)
def test_what_two_optimizers_do_not_go_on_with_is_named(origin, planted, expected_cause, noun):
    """Its steps are of another number of calls each, gradients come from `autograd.grad`, and
    tensors are pickled.
    """
    (origin / "train.py").write_text(_TWO)
    kinds = ("term",) if planted else ("term", "kill", "memory")
    report = tried([sys.executable, "train.py", planted], origin, *kinds)
    assert {row.result for row in report.rows} == {"another training" if planted else "exact"}
    assert {cause(row) for row in report.rows} == {expected_cause}
    assert [row.detail for row in report.rows if noun not in row.detail] == []


@pytest.mark.parametrize("planted", [False, True])
def test_each_rank_is_compared_with_itself(origin, planted):
    """A rank that is killed is started again with the others.

    What only another rank does wrong is found.
    """
    (origin / "ranks.py").write_text(_RANKS)
    report = tried([sys.executable, "ranks.py", *["planted"] * planted], origin, "kill")
    assert {row.result for row in report.rows} == {"another training" if planted else "exact"}
    assert {"on rank 1" in row.detail for row in report.rows} == {planted}


def test_a_training_that_nobody_can_repeat_is_called_so(origin):
    """Two undisturbed runs that differ are compared no further.

    It survives, and where they differ is said.
    """
    (origin / "train.py").write_text(
        "import torch\ntorch.seed()\nweight = torch.nn.Parameter(torch.randn(3))\noptimizer ="
        " torch.optim.SGD([weight], 0.1)\nfor _ in range(5):\n    (weight ** 2).sum().backward()\n "
        "   optimizer.step()\n    optimizer.zero_grad()\n"
    )
    report = tried([sys.executable, "train.py"], origin, "first")
    assert [row.result for row in report.rows] == ["survives"]
    assert report.unsteady is not None
    assert not report.passed  # it cannot be said
    assert report.unsteady.step == 1
    assert "no checkpoint" in report.remarks[0]


_STEPS = "import torch\nw = torch.nn.Parameter(torch.ones(1))\no = torch.optim.SGD([w], 0.1)\n"
_STEPS += "for _ in range({}):\n    (w * w).backward()\n    o.step()\n"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import torch", "optimizer"),
        (_STEPS.format(2), "fewer than 4 steps"),
        ("raise SystemExit('no data')", "exit code 1: no data"),
        (
            _STEPS.format(5) + "torch.save(w, '{elsewhere}')",
            r"weights\.pt",
        ),
        # Before torch
        (
            "open('{elsewhere}', 'w')\n" + _STEPS.format(5),
            r"weights\.pt",
        ),
    ],
)
def test_a_command_that_cannot_be_put_to_the_test_is_refused(
    origin, tmp_path_factory, script, words
):
    """What is wrong is said, with what to do, before any fault."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "weights.pt"
    (origin / "train.py").write_text(script.replace("{elsewhere}", str(elsewhere)))
    with pytest.raises(PolicyError, match=words) as caught:
        tried([sys.executable, "train.py"], origin)
    assert caught.value.rule == "H729"


def test_the_command_line_says_it_in_words_and_for_machines(origin, monkeypatch):
    """Exit code 1 for a training that is another one afterwards; --json holds each trial.

    2 is wrong use.
    """
    monkeypatch.chdir(origin)
    ask = CliRunner().invoke
    app = make_app("chaos", "events")  # two, so that the name of the command is expected
    words = ["--", *command("classifier", "momentum reset")]
    ended = ask(app, ["chaos", "--json", "--only", "term", *words])
    found = json.loads(ended.stdout)
    assert (ended.exit_code, found["passed"], found["rows"][0]["result"]) == (
        1,
        False,
        "another training",
    )
    assert found["rows"][0]["comparison"]["differences"][0]["what"] == "optimizer"
    ended = ask(app, ["chaos", "--only", "term", *words[:-1]])
    assert ended.exit_code == 0
    assert "1 of 1 faults" in ended.stdout
    for wrong in (["--only", "kil"], ["--budget", "soon"]):
        ended = ask(app, ["chaos", *wrong, *words])
        assert ended.exit_code == 2
        assert "H729" in ended.stderr


def test_a_test_can_ask_for_it(origin):
    """`check_survives` returns the report of a training that survives, and raises for another
    one, with the rows.
    """
    assert check_survives(command("classifier"), cwd=origin, only=["term"]).passed
    with pytest.raises(
        AssertionError, match=r"SIGTERM in step .*: another training: step .*learning rate"
    ):
        check_survives(
            command("classifier", "learning rate from the start"), cwd=origin, only=["term"]
        )


_RANDOM_NAMES = """
import os, tempfile, torch
torch.manual_seed(0)
weight, first = torch.nn.Parameter(torch.randn(3)), 0
optimizer = torch.optim.SGD([weight], 0.1)
if os.path.exists("c.pt"):
    saved = torch.load("c.pt")
    weight.data, first = saved["weight"], saved["step"]
for step in range(first, 8):
    optimizer.zero_grad()
    (weight * step).square().sum().backward()
    optimizer.step()
    handle, name = tempfile.mkstemp(dir=".")
    torch.save({"weight": weight.data, "step": step + 1}, name)
    os.close(handle)
    os.replace(name, "c.pt")
"""


@pytest.mark.parametrize("change", ["torch.save({}, place)", "os.remove(place)"])
def test_what_a_training_does_at_home_is_refused(origin, monkeypatch, tmp_path_factory, change):
    """The home directory is no cache: a file there that is written or removed is named."""
    home = tmp_path_factory.mktemp("home")
    (home / "best.pt").write_text("mine")
    monkeypatch.setenv("HOME", str(home))
    script = _RANDOM_NAMES + f"place = {str(home / 'best.pt')!r}\n{change}\n"
    (origin / "train.py").write_text(script)
    with pytest.raises(PolicyError, match=r"best\.pt"):
        Campaign([sys.executable, "train.py"], origin=origin, only=["kill"]).run()


def test_what_was_saved_is_damaged_under_its_later_name_and_no_file_of_others(
    origin, monkeypatch, tmp_path_factory
):
    """A larger file that the training links to is somebody's data.

    A last line like markup of Rich is shown.
    """
    data = tmp_path_factory.mktemp("data") / "data.bin"
    data.write_bytes(bytes(100_000))
    script = _RANDOM_NAMES.replace('torch.load("c.pt")', 'load("c.pt")').replace(
        "\ntorch.manual",
        f"""
os.path.exists("d.bin") or os.link({str(data)!r}, "d.bin")
def load(name):
    try:
        return torch.load(name)
    except Exception:
        raise SystemExit(r"bad pattern \\[/x]")
torch.manual""",
        1,
    )
    linked = (
        # Its own: no data of others
        "os.path.exists('k.pt') and os.remove('k.pt')\n    os.link('c.pt', 'k.pt')\n"
    )
    (origin / "train.py").write_text(f"{script}    {linked}")
    monkeypatch.chdir(origin)
    # Its copy is started
    words = ["chaos", "--only", "damage", "--", sys.executable, str(origin / "train.py")]
    ended = CliRunner().invoke(make_app("chaos", "events"), words)
    assert ended.exit_code == 1, ended.exception
    assert r"pattern \[/x] (c.pt" in ended.stdout
    assert data.read_bytes() == bytes(100_000)
    assert {each.name for each in origin.iterdir()} == {"notes.txt", "train.py"}


_LOUD = """
import os, signal, torch
class Loud(torch.nn.Linear):  # a worker dies at some moment: here while the observer looks at the weights
    def named_parameters(self, *given, **more):
        armed and os.kill(os.getpid(), signal.SIGUSR1)
        return super().named_parameters(*given, **more)
def fails(*_):
    raise RuntimeError("a worker has died")
signal.signal(signal.SIGUSR1, fails)
torch.manual_seed(0)
armed, met, model = False, 0, Loud(2, 1)
optimizer = torch.optim.SGD([model.weight, model.bias], 0.1)
for step in range(6):
    optimizer.zero_grad()
    model(torch.ones(1, 2) * step).sum().backward()
    armed = step > 0
    try:
        optimizer.step()
    except RuntimeError:
        met += 1
    armed = False
assert met == 5, met
"""


def test_an_error_that_a_handler_of_signals_raises_is_the_trainings(origin):
    """It is neither swallowed nor does it keep a step from the trace."""
    (origin / "train.py").write_text(_LOUD)
    report = tried([sys.executable, "train.py"], origin, "first")
    assert (report.steps, [row.result for row in report.rows]) == (6, ["exact"])


_SWEEP = """
import os, sys, torch
for name, rate in (("a", 0.1), ("b", 0.01)):
    torch.manual_seed(0)
    weight, first = torch.nn.Parameter(torch.randn(3)), 0
    optimizer = torch.optim.SGD([weight], rate)
    if os.path.exists(name):
        saved = torch.load(name)
        weight.data, first = saved["weight"], saved["step"]
    for step in range(first, 8):
        optimizer.zero_grad()
        (weight * step).square().sum().backward()
        optimizer.step()
        if step % 3 == 2:
            torch.save({"weight": weight.data, "step": step + (2 if "planted" in sys.argv else 1)}, name + ".tmp")
            os.replace(name + ".tmp", name)
"""


@pytest.mark.parametrize("planted", [False, True])
def test_each_training_of_a_sweep_goes_on_from_its_own_save(origin, planted):
    """The first is ended again from its last save, before the second goes on: no work is lost."""
    (origin / "train.py").write_text(_SWEEP)
    report = tried([sys.executable, "train.py", *["planted"] * planted], origin, "kill", "term")
    assert {row.result for row in report.rows} == {"another training" if planted else "exact"}
    assert max(max(row.comparison["resumed_at"]) for row in report.rows) > 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_campaign_says_what_it_has_found(
    origin, monkeypatch, tmp_path_factory, number
):
    """After the first fault.

    The table of what was tried, an exit code that says why, a page, and no copy left.
    """
    scratch = tmp_path_factory.mktemp("scratch")
    before = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.chdir(origin)
    monkeypatch.setattr(
        cli,
        "_print_progress",
        lambda line: os.kill(os.getpid(), number) if "exact" in line else None,
    )
    words = ["--page", "page.html", "--", *command("classifier")]
    ended = CliRunner().invoke(make_app("chaos", "events"), ["chaos", *words])
    signal.signal(number, before)
    assert ended.exit_code == 128 + number
    assert "1 of 1 faults" in ended.stdout
    assert "interrupted" in ended.stdout
    assert "not tried" in (origin / "page.html").read_text()
    assert list(scratch.iterdir()) == []


_GAN = """
import os, torch
torch.manual_seed(1)
nets = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)) for _ in range(2))
(one, other), first = nets, 0
steps = [torch.optim.Adam(net.parameters()) for net in nets]
if os.path.exists("all.pt"):
    saved = torch.load("all.pt", weights_only=False)
    nets.load_state_dict(saved["nets"])
    [each.load_state_dict(state) for each, state in zip(steps, saved["steps"])]
    first = saved["step"]
del nets
for step in range(first, 8):
    x = torch.sin(torch.arange(12.0) * (step + 1)).view(4, 3)
    one(other(x).detach()).square().sum().backward()
    steps[0].step()
    one(other(x)).square().sum().backward()  # and with it the statistics of the first change again
    steps[1].step()
    [each.zero_grad() for each in steps]
    states = {f"{at}.{key}": value for at, net in enumerate((one, other)) for key, value in net.state_dict().items()}
    torch.save({"nets": states, "steps": [each.state_dict() for each in steps], "step": step + 1}, "new.pt")
    os.replace("new.pt", "all.pt")
"""


def test_a_model_may_compute_between_the_steps_of_its_optimizer(origin):
    """As the discriminator of a GAN in the step of the generator.

    Its buffers after its own step are not the last.
    """
    (origin / "train.py").write_text(_GAN)
    report = tried([sys.executable, "train.py"], origin, "kill", "term")
    assert {row.result for row in report.rows} == {"exact"}
    assert [
        row.comparison["differences"] for row in report.rows if row.comparison["differences"]
    ] == []


_THREAD = """
import copy, os, threading, time, torch
class Slow:
    def __reduce__(self):
        time.sleep(0.3)
        return Slow, ()
torch.manual_seed(0)
model, first, thread = torch.nn.Linear(3, 1), 0, threading.Thread(target=print)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
thread.start()
if os.path.exists("c.pt"):
    saved = torch.load("c.pt", weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
def save(state):
    torch.save(state, "new.pt")
    os.replace("new.pt", "c.pt")
for step in range(first, 12):
    optimizer.zero_grad()
    model(torch.ones(3) * step / 12).square().sum().backward()
    optimizer.step()
    if step % 4 == 1:
        thread.join()
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        thread = threading.Thread(target=save, args=[{**copy.deepcopy(states), "slow": Slow()}])
        thread.start()
    time.sleep(0.1)
thread.join()
"""


def test_a_training_that_goes_on_while_it_saves_is_seen_all_the_same(origin):
    """What its thread writes is no state of the step that has come meanwhile, and no step goes
    unseen.
    """
    (origin / "train.py").write_text(_THREAD)
    report = tried([sys.executable, "train.py"], origin, "kill", "term")
    assert (report.unsteady, report.steps, {row.result for row in report.rows}) == (
        None,
        12,
        {"exact"},
    )


_GUARDED = """
import time, torch, holdfast
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
policy = holdfast.Policy(save_interval_steps=3, diagnose=False)
loader = holdfast.DataLoader(torch.arange(24.0), batch_size=2, shuffle=True, seed=1)
guard = holdfast.Guard("run", model=model, optimizer=optimizer, loader=loader, policy=policy)
for batch in guard.batches(max_epochs=1):
    guard.step(batch, lambda part: model(part[:, None].expand(-1, 64)).square().mean())
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_guard_is_hit_where_it_saves(origin, monkeypatch):
    """Half-way through its file, by a full or failing disk, and in a checkpoint, not its
    records: it is exact.
    """
    monkeypatch.setattr(trials, "subprocess", forking(loaded=WITHOUT_HOLDFAST))
    (origin / "train.py").write_text(_GUARDED)
    kinds = ("save", "disk", "io", "clock", "damage")
    report = tried([sys.executable, "train.py"], origin, *kinds)
    assert {(row.kind, row.result) for row in report.rows} == {(kind, "exact") for kind in kinds}
    assert all(".safetensors" in row.detail for row in report.rows if row.kind == "damage")
    assert [row.attempts for row in report.rows if "middle of writing" in row.fault] == [2]
    assert not any(
        "damaged-" in each for row in report.rows if row.kind == "io" for each in row.left_files
    )


_CAREFUL = "print('x' * 9999)\n    try:\n        torch.save"
_AGAIN = (
    "for _ in range(2):\n        try:\n            model(torch.ones(3) * step).sum().backward()\n  "
    "          "
)
_AGAIN += "break\n        except RuntimeError: pass"
_BATCHES = (
    "loaded = iter(torch.utils.data.DataLoader(range(8)))\n[next(loaded) for _ in"
    " range(first)]\nfor step"
)
_MODEL = "model = torch.nn.Linear(3, 1)\nweight, first"
_PAIR = "model = torch.nn.Linear(3, 1)\npair = torch.nn.ModuleList([model, torch.nn.Linear(3, 1)])"
_AVERAGED = "optimizer.step()\n    pair[1].weight.data.lerp_(model.weight.data, 0.5)"
_BUFFER = "buffer := __import__('io').BytesIO())"
_WRITE = 'open("c.pt", "wb").write(buffer.getbuffer())'

_IN_FILE = """, open(name, "wb"))
    except OSError as error:
        if error.errno in (28, 5) and os.path.getsize(name):
            continue
        raise
"""
_FILES = [
    ("torch.save", "try:\n        torch.save"),
    (", name)\n", _IN_FILE),
    ("import os", "import os, time"),
]
_READ = """
    try:
        open("c.pt", "rb").read()
    except OSError as error:
        open("met", "w").write("read again" * (error.errno == 5))
    saved ="""
_BY_TIME = [
    ("import os", "import glob, os\nfrom datetime import datetime\nimport os"),
    ('os.path.exists("c.pt")', '(files := sorted(glob.glob("*.pt"), key=lambda name: name[0:]))'),
    ('load("c.pt")', "load(files[-1])"),
    ('name, "c.pt")', 'name, f"{datetime.now():%Y%m%d%H%M%S%f}-{step}.pt")'),
]
_DRAWN = (
    "loaded = iter(torch.utils.data.DataLoader(range(8), collate_fn=lambda _:"
    " torch.tensor(numpy.random.rand(3))))"
)
_DRAWN += "\nnumpy.random.seed(0)\nfor step"


@pytest.mark.parametrize(
    ("edits", "kind", "results", "words"),
    [
        # A temporary name that is another each time is no save that is missing.
        ([], "kill", ["exact"] * 3, "steps"),
        # A training that prints much, and goes on when a save fails, is seen to its end.
        (
            [
                ("torch.save", _CAREFUL),
                ("name)\n", "name)\n    except (OSError, RuntimeError): pass\n"),
            ],
            "disk",
            ["exact"],
            "0 steps",
        ),
        # Where no step changes a weight, the place is told by the batch.
        (
            [("weight * step", "weight * next(loaded) * 0"), ("for step", _BATCHES)],
            "kill",
            ["exact"] * 3,
            "steps",
        ),
        (
            [
                ("weight * step", "weight * next(loaded) * 0"),
                ("for step", _BATCHES),
                ('saved["step"]', "0"),
            ],
            "kill",
            ["work is lost"] * 3,
            "from the beginning",
        ),
        # A name that is saved makes no other training, but is said.
        (
            [('"step": step', '"config": {"from": "resume" if first else "new"}, "step": step')],
            "term",
            ["exact"],
            "'config.from': 'resume' instead of 'new'",
        ),
        # A forward whose backward had no memory is no part of the step.
        (
            [
                ("(weight * step).square().sum().backward()", _AGAIN),
                ("weight, first", _MODEL),
                ("torch.nn.Parameter(torch.randn(3))", "model.weight"),
            ],
            "memory",
            ["exact"],
            "0 steps",
        ),
        # A closure makes the gradients within the step, the first one too.
        (
            [
                ("optimizer.zero_grad()", "pass"),
                ("(weight * step)", "loss = lambda: (optimizer.zero_grad(), (weight + 1)"),
                (".backward()", ".backward())[1]"),
                ("optimizer.step()", "optimizer.step(loss)"),
            ],
            "first",
            ["exact"],
            "",
        ),
        # A save through a buffer, as Lightning makes it, can be cut where it is written, here in
        # place.
        (
            [("+ 1}, name)", "+ 1}, " + _BUFFER), ('os.replace(name, "c.pt")', _WRITE)],
            "save",
            ["exact", "does not survive"],
            "",
        ),
        # A disk that is full, or fails once, says so half-way through a file; the training goes on.
        (_FILES, "disk", ["exact"], "0 steps"),
        (_FILES, "io", ["exact"] * 2, "steps"),
        # A read that fails once succeeds when it is made again.
        ([("\n    saved =", _READ)], "io", ["exact"] * 2, "steps"),
        # The newest by the time in its name is not the newest after the clock was set back.
        (_BY_TIME, "clock", ["work is lost"], "step 2"),
        ([*_BY_TIME, ("[0:]", "[-4:]")], "clock", ["exact"], "steps"),
        # Where the batch is drawn from a random state that is lost, that is the cause.
        (
            [
                ("weight * step", "weight * next(loaded)"),
                ("for step", _DRAWN),
                ("import os", "import numpy, os"),
            ],
            "kill",
            ["another training"] * 3,
            "the random state of numpy",
        ),
        # One of which nothing is made is no cause, although steps draw from it, and it differs in
        # the very step.
        (
            [("weight * step", "weight * step * (1 + (first > 0)) + 0 * torch.rand(3)")],
            "kill",
            ["another training"] * 3,
            "the loss",
        ),
        # One that was restored, and of which more is drawn since something else is lost, is no
        # cause either.
        (
            [
                (
                    "(weight * step)",
                    (
                        "(model(torch.ones(3)) + model(numpy.random.rand(len(kept)).sum() *"
                        " torch.ones(3)))"
                    ),
                ),
                ("weight, first", "import numpy\nnumpy.random.seed(0)\nkept = []\n" + _MODEL),
                ("torch.nn.Parameter(torch.randn(3))", "model.weight"),
                ('"step": s', '"n": numpy.random.get_state(), "step": s'),
                (
                    'load("c.pt")',
                    'load("c.pt", weights_only=False)\n    numpy.random.set_state(saved["n"])',
                ),
                ("    optimizer.zero_grad()", "    kept.append(optimizer.zero_grad())"),
            ],
            "kill",
            ["another training"] * 3,
            "inputs",
        ),
        # An average in one module with the weights, moved after the step, is compared where it is
        # saved.
        (
            [
                ("weight, first", _PAIR + "\nweight, first"),
                ("torch.nn.Parameter(torch.randn(3))", "model.weight"),
                ("optimizer.step()", _AVERAGED),
                ('"step": s', '"mean": pair[1].weight.data, "step": s'),
                ('saved["step"]', 'saved["step"]\n    pair[1].weight.data = saved["mean"]'),
            ],
            "kill",
            ["exact"] * 3,
            "steps",
        ),
        # What a model computes only to act, as often as each start likes, is no part of a step.
        (
            [
                ("(weight * step).square().sum()", "model(torch.ones(3) * step).sum()"),
                ("weight, first", _MODEL),
                ("torch.nn.Parameter(torch.randn(3))", "model.weight"),
                ("for step", "[model(torch.ones(3)) for _ in range(first + 1)]\nfor step"),
            ],
            "kill",
            ["exact"] * 3,
            "",
        ),
        # A start that makes no step is named.
        (
            [(', saved["step"]', ", 8")],
            "kill",
            ["another training"] * 3,
            "saved",
        ),
    ],
)
def test_what_a_training_may_do(origin, edits, kind, results, words):
    """Programs that differ in one habit."""
    script = _RANDOM_NAMES
    for old, new in edits:
        script = script.replace(old, new, 1)
    (origin / "train.py").write_text(script)
    report = tried([sys.executable, "train.py"], origin, kind)
    assert (report.steps, sorted(row.result for row in report.rows)) == (8, sorted(results))
    assert all(words in row.detail and row.attempts <= 3 for row in report.rows)
    assert kind == "clock" or {name for row in report.rows for name in row.left_files} <= {
        "tmp*",
        "met",
        "c.pt",
    }
    assert edits != _FILES or {
        row.attempts for row in report.rows if "in the middle of" in row.fault
    } == {1}


@pytest.mark.slow
def test_a_rank_may_be_slow_or_lose_its_connections(origin):
    """One that goes on after 10 s changes nothing.

    One without connections ends them all, and they begin again.
    """
    group = (
        'torch.distributed.init_process_group("gloo",'
        ' init_method=f"file://{os.getcwd()}/{os.getppid()}", '
    )
    script = _RANKS.replace(
        "torch.manual_seed(0)", f"{group}rank=rank, world_size=2)\ntorch.manual_seed(0)"
    )
    script = script.replace("    torch.save", "    torch.distributed.barrier()\n    torch.save")
    script = script.replace('not os.path.exists(f"step{step}")', "False")
    (origin / "ranks.py").write_text(script)
    report = tried([sys.executable, "ranks.py"], origin, "rank")
    rows = {row.fault.partition(" in ")[0]: (row.result, row.attempts) for row in report.rows}
    found = {
        "rank 1 killed": ("exact", 2),
        "rank 1 stopped for 10 s": ("exact", 1),
        "rank 1 cut off": ("exact", 2),
    }
    assert rows == found | {"rank 1 stopped": ("hangs", 2)}
