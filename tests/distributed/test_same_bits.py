"""The same bits for every legal number of processes: DataParallel in a loop of one's own."""

import contextlib
import re

import pytest
from places import ROOT
from ranks import run_ranks

import xtrain as xt
from xtrain import nn, optim
from xtrain.distributed import DataParallel
from xtrain.distributed.bank import Bank, Counter, legal_sizes
from xtrain.errors import ConfigError

LOOP = """
import hashlib, sys
import xtrain as xt
from xtrain import nn, optim

dtype, leaves, wanted = getattr(xt, sys.argv[1]), int(sys.argv[2]), sys.argv[3]
xt.distributed.init()
xt.manual_seed(1 + (xt.distributed.rank() if wanted == "parameters" else 0))  # rank 0's parameters are everybody's
middle = [nn.Linear(96, 96, bias=False), nn.Linear(96, 96, bias=False)] if wanted == "muon" else []
model = nn.Sequential(nn.Linear(16, 96), *middle, nn.SiLU(), nn.Linear(96, 16, bias=False)).to(dtype)
matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == many] for many in (True, False))
optimizer = optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)
if wanted == "muon":
    optimizer = optim.ChainedOptimizer([optim.Muon(matrices, lr=1e-2), optim.AdamW(vectors, lr=1e-2)])
dp = xt.distributed.DataParallel(model, optimizer, max_ranks=leaves)
xt.manual_seed(7)
x = xt.randn(24, 16).to(dtype)
for step in range(4):
    optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
    if wanted == "frozen":
        model[0].requires_grad_(step > 1)
        model[-1].requires_grad_(step < 2)
        with xt.no_grad():
            model[0 if step < 2 else -1].weight.mul_(1.5)  # stays, as nothing steps it
    for rows, target in dp.leaves((x, -x)):
        noise = 0.1 * xt.randn(*rows.shape).to(dtype)  # drawn for the leaf, whoever has it
        part = (model(rows + noise) - target).square().sum() / x.shape[0]
        part.backward()
    norm = dp.step(clip=5.0 if step % 2 else None)
    print(step, norm.item().hex())
with dp.whole_optimizer():
    state = optimizer.state_dict()["state"]
    if xt.distributed.rank() == 0:
        for kept in state.values():
            for name, value in kept.items():
                print(name, value if isinstance(value, int) else hashlib.sha256(value.float().cpu().numpy()).hexdigest())
for p in model.parameters():
    print(hashlib.sha256(p.detach().float().cpu().numpy()).hexdigest())
xt.distributed.shutdown()
"""


@pytest.mark.parametrize(
    ("dtype", "leaves", "sizes", "wanted"),
    [
        ("float32", 12, (1, 3), "parameters"),
        ("bfloat16", 4, (1, 2, 4), "parameters"),
        ("float32", 4, (1, 2, 4), "muon"),
        ("bfloat16", 2, (1, 2), "frozen"),
    ],
)
def test_own_loop(dtype, leaves, sizes, wanted, tmp_path):
    outputs = []
    count = 5 if wanted == "muon" else 3  # parameters
    for size in sizes:
        found = run_ranks(size, ["-c", LOOP, dtype, str(leaves), wanted], tmp_path / str(size))
        assert [one.status for one in found] == [0] * size, found
        lines = found[0].out.splitlines()
        for other in found[1:]:  # they have no state
            assert other.out.splitlines() == lines[:4] + lines[-count:], found
        outputs.append(lines)
    states = 4 + 3 if wanted == "muon" else 3 * (4 if dtype == "bfloat16" else 3)
    assert len(outputs[0]) == 4 + states + count
    for size, lines in zip(sizes, outputs, strict=True):
        assert lines == outputs[0], size


def test_one_process_takes_the_steps_of_adamw():
    """With one leaf, what DataParallel does is the optimizer's own step, and clipping; each group has its options."""
    runs = []
    for parallel in (False, True):
        xt.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        weights, biases = ([p for p in model.parameters() if p.ndim == ndim] for ndim in (2, 1))
        groups = [{"params": biases, "lr": 0.05, "weight_decay": 0.0}, {"params": weights, "betas": (0.5, 0.9)}]
        optimizer = optim.AdamW(groups, lr=1e-2, weight_decay=0.3)
        dp = DataParallel(model, optimizer) if parallel else None
        x = xt.randn(8, 5)
        for _ in range(3):
            if dp is not None:
                for (rows,) in dp.leaves((x,)):
                    model(rows).square().sum().backward()
                norm = dp.step(clip=0.5).item()
            else:
                optimizer.zero_grad()
                model(x).square().sum().backward()
                norm = optim.clip_grad_norm_(model.parameters(), 0.5).item()
                optimizer.step()
        runs.append((norm, [p.detach().tolist() for p in model.parameters()]))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-6)
    for plain, parallel in zip(runs[0][1], runs[1][1], strict=True):
        flat = [xt.tensor(one).reshape(-1).tolist() for one in (plain, parallel)]
        assert flat[0] == pytest.approx(flat[1], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("dtype", [xt.float32, xt.bfloat16])
def test_frozen_parameters_are_left_alone(dtype):
    """As in one process: no decay, no step, no state. One that thaws begins with the value it has then, and one that is
    frozen keeps its moments.
    """
    runs = []
    for parallel in (False, True):
        xt.manual_seed(6)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).to(dtype)
        muon = optim.Muon([model[2].weight, model[3].weight], lr=0.1, weight_decay=0.4)
        others = [*model[0].parameters(), *model[1].parameters(), model[2].bias, model[3].bias]
        optimizer = optim.ChainedOptimizer([muon, optim.AdamW(others, lr=0.1, weight_decay=0.4)])
        ema = optim.EMA([*muon.param_groups[0]["params"], *others], 0.5, optimizer)
        dp = DataParallel(model, optimizer, ema=ema) if parallel else None
        x = xt.randn(8, 4).to(dtype)
        for step in range(4):
            for i in (0, 2):  # thaw
                model[i].requires_grad_(step > 1)
            for i in (1, 3):  # are frozen
                model[i].requires_grad_(step < 2)
            before = [p.detach().tolist() for p in model.parameters() if not p.requires_grad]
            if dp is not None:
                for (rows,) in dp.leaves((x,)):
                    model(rows).square().sum().backward()
                dp.step()
            else:
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
                ema.update()
            assert [p.detach().tolist() for p in model.parameters() if not p.requires_grad] == before
            if step == 1:
                with xt.no_grad():
                    model[0].weight.mul_(1.01)
                    model[2].weight.mul_(1.01)
        with dp.whole_optimizer() if dp is not None else contextlib.nullcontext():
            runs.append(repr([optimizer.state_dict(), ema.state_dict(), list(model.parameters())]))
    assert runs[0] == runs[1]


def test_a_state_without_a_parameter_starts_it_anew():
    """As the optimizer's own load_state_dict: the moments of another run do not stay."""
    runs = []
    for steps in (0, 2):
        model = nn.Linear(3, 3)
        dp = parallel(model)
        for _ in range(steps):
            for (rows,) in dp.leaves((xt.ones(1, 3),)):
                model(rows).sum().backward()
            dp.step()
        dp.take_states()
        with dp.whole_optimizer():
            runs.append(len(dp.optimizer.state))
        assert not any(moment.any().item() for owned in dp._owned for moment in owned.moments.values())
    assert runs == [0, 0]


def test_states_that_cannot_be_gathered_leave_nothing_behind(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).to(xt.float64))  # two banks
    dp = parallel(model)
    for (rows,) in dp.leaves((xt.ones(1, 3),)):
        (model[0](rows).sum() + model[1](rows.double()).sum()).backward()
    dp.step()
    gather = dp._all
    seen = []

    def broken(piece, what):
        seen.append(what)
        if len(seen) == 3:
            raise RuntimeError("no luck")
        return gather(piece, what)

    monkeypatch.setattr(dp, "_all", broken)
    with pytest.raises(RuntimeError, match="no luck"), dp.whole_optimizer():
        raise AssertionError("the block must not begin")
    assert not dp.optimizer.state


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_states_go_in_and_out(name):
    """A state that was gathered and taken again goes on as if nothing had happened."""

    def run(interrupted):
        xt.manual_seed(5)
        model = nn.Linear(6, 4).to(xt.bfloat16)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        if name == "muon":
            optimizer = optim.ChainedOptimizer([optim.Muon([model.weight]), optim.AdamW([model.bias])])
        dp = DataParallel(model, optimizer, max_ranks=2)
        x = xt.randn(4, 6).to(xt.bfloat16)
        for step in range(4):
            if step == 2 and interrupted:
                with dp.whole_optimizer():
                    state = optimizer.state_dict()
                assert not optimizer.state
                optimizer.load_state_dict(state)
                dp = DataParallel(model, optimizer, max_ranks=2)
            for (rows,) in dp.leaves((x,)):
                model(rows).square().sum().backward()
            dp.step()
        with dp.whole_optimizer():
            return repr(optimizer.state_dict()), [p.detach().tolist() for p in model.parameters()]

    assert run(False) == run(True)


def test_a_matrix_of_muon_lies_on_one_rank_whole():
    """The largest first, each where the most room is; a piece is as long as the fullest."""
    matrices = [xt.ones(rows, 128) for rows in (1, 50, 70, 20, 3)]
    bank = Bank(matrices, 2, whole=True)
    piece = bank.length // 2
    assert piece == 16384 and piece % 8192 == 0
    assert bank.offsets == [piece + 128 * 70, piece, 0, piece + 128 * 50, 128 * 70]
    for size in (1, 2):
        for rank in range(size):
            begin, count = bank.length // size * rank, bank.length // size
            assert all(s.end - s.begin == matrices[s.parameter].numel() for s in bank.segments(begin, begin + count))


def test_one_leaf_of_muon_takes_the_steps_of_muon():
    runs = []
    for parallel in (False, True):
        xt.manual_seed(4)
        model = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 20), nn.Linear(20, 20))
        vectors = [layer.bias for layer in model]
        muon = optim.Muon([layer.weight for layer in model], lr=0.02, momentum=0.8, adjust_lr_fn="match_rms_adamw")
        optimizer = optim.ChainedOptimizer([muon, optim.AdamW(vectors)])
        dp = DataParallel(model, optimizer) if parallel else None
        x = xt.randn(6, 12)
        for step in range(3):
            muon.param_groups[0]["lr"] = 0.02 / (step + 1)
            if dp is None:
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
            else:
                for (rows,) in dp.leaves((x,)):
                    model(rows).square().sum().backward()
                dp.step()
        runs.append([p.detach().cpu().numpy().tobytes() for p in model.parameters()])
    assert runs[0] == runs[1]


def test_a_gradient_that_is_not_finite_changes_nothing():
    model = nn.Linear(3, 3)
    dp = DataParallel(model, optim.AdamW(model.parameters()), max_ranks=2)
    before = [p.detach().tolist() for p in model.parameters()]
    for (rows,) in dp.leaves((xt.tensor([[1.0, 2.0, float("inf")]] * 2),)):
        model(rows).sum().backward()
    norm = dp.step(clip=1.0).item()
    assert norm != norm or norm == float("inf")
    assert [p.detach().tolist() for p in model.parameters()] == before
    for (rows,) in dp.leaves((xt.ones(2, 3),)):  # and is no step
        model(rows).sum().backward()
    dp.step()
    with dp.whole_optimizer():
        assert {state["step"] for state in dp.optimizer.state.values()} == {1}


def test_a_guard_of_ones_own_stops_a_step():
    model = nn.Linear(3, 3)
    dp = DataParallel(model, optim.AdamW(model.parameters()))
    before = [p.detach().tolist() for p in model.parameters()]
    for guard in (float("nan"), 0.0):
        for (rows,) in dp.leaves((xt.ones(2, 3),)):
            model(rows).sum().backward()
        dp.reduce()
        dp.update(xt.tensor(guard))
        assert ([p.detach().tolist() for p in model.parameters()] == before) == (guard != guard)


def test_parameters_without_a_gradient_count_as_zero():
    """A leaf that does not reach a parameter adds zero to it, in a place of its own."""
    parameters = [xt.ones(3), xt.ones(130), xt.ones(2, 2)]
    for parameter in parameters:
        parameter.requires_grad_()
    bank = Bank(parameters, 3)
    assert (bank.offsets, bank.length) == ([0, 128, 384], 8192 * 3)
    (parameters[0] * 2).sum().backward()
    counter = Counter(bank, 1)
    counter.push(bank.take_gradients())
    flat = counter.packed()
    assert flat[:3].tolist() == [2.0] * 3 and flat.sum().item() == 6.0
    assert all(parameter.grad is None for parameter in parameters)
    assert [(s.parameter, s.begin, s.end) for s in bank.segments(64, 386)] == [(1, 64, 194), (2, 320, 322)]


@pytest.mark.parametrize("leaves", [1, 2, 3, 4, 5, 8, 11, 12, 24])
def test_leaves_are_added_as_the_tree_adds_them(leaves):
    """In groups: also where the last one is not full; and with the squares of what comes out."""
    parameters = [xt.ones(200, 50), xt.ones(3)]
    bank = Bank(parameters, leaves)
    counter, banks = Counter(bank, leaves), []
    for _ in range(leaves):
        gradients = [xt.randn(*p.shape) for p in parameters]
        banks.append(bank.sum([gradients], xt.empty(bank.length)))
        counter.push(gradients)
    squares, expected = xt.zeros(bank.length // 8192, dtype=xt.float64), xt.zeros(bank.length // 8192, dtype=xt.float64)
    whole = xt._C.tree_sum_(xt.empty(bank.length), banks, expected)
    assert counter.finish(squares).cpu().numpy().tobytes() == whole.cpu().numpy().tobytes()
    assert squares.tolist() == expected.tolist() and squares[0].item() > 0


def test_legal_sizes():
    assert [legal_sizes(leaves) for leaves in (1, 4, 12, 7)] == [[1], [1, 2, 4], [1, 3, 6, 12], [1, 7]]


def parallel(model=None, **changes):
    model = nn.Linear(2, 2) if model is None else model
    return DataParallel(model, **{"optimizer": optim.AdamW(model.parameters()), **changes})


def strided():
    model = nn.Linear(2, 3)
    model.weight = nn.Parameter(xt.ones(2, 3).transpose(0, 1))
    return parallel(model)


def reduced():
    dp = parallel()
    for (rows,) in dp.leaves((xt.ones(1, 2),)):
        dp.model(rows).sum().backward()
    dp.reduce()
    return dp


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: DataParallel(3, None), TypeError, "DataParallel: model must be a Module, got int"),
        (lambda: parallel(optimizer=3), TypeError, "DataParallel: optimizer must be AdamW or Muon, got int"),
        (strided, ValueError, "DataParallel: parameter weight must be contiguous, got strides of a view"),
        (lambda: parallel(mode="fast"), ValueError, "DataParallel: mode must be exact, got 'fast'"),
        (
            lambda: parallel(max_ranks=0),
            ValueError,
            "DataParallel: max_ranks must be a whole number in \\[1, 2\\*\\*20\\], got 0",
        ),
        (
            lambda: parallel(optimizer=optim.AdamW([xt.ones(2).requires_grad_()])),
            ValueError,
            "DataParallel: optimizer must have parameters of the model alone, got others",
        ),
        (
            lambda: parallel(optimizer=optim.AdamW([{"params": []}])),
            ValueError,
            "DataParallel: optimizer must have at least one parameter, got none",
        ),
        (
            lambda: list(parallel(max_ranks=2).leaves((xt.ones(3, 2),))),
            ValueError,
            r"leaves: every tensor of batch must have one number of rows, a multiple of max_ranks \(2\), got 3",
        ),
        (lambda: list(parallel().leaves((xt.ones(2), xt.ones(3)))), ValueError, "leaves: .*, got 2, 3"),
        (lambda: list(parallel().leaves(())), ValueError, "leaves: .*, got no tensors"),
        (lambda: parallel().step(), RuntimeError, r"step: leaves\(\) must have come to its end, got 0 leaves"),
        (lambda: parallel().update(), RuntimeError, r"update: reduce\(\) must come before, got no gradients"),
        (
            lambda: parallel(ema=optim.EMA([xt.ones(2)])),
            ValueError,
            "DataParallel: ema must have the parameters of the optimizer, got others",
        ),
        *(
            (
                lambda bad=bad: parallel().step(clip=bad),
                ValueError,
                f"step: clip must be .* than 0, or None, got {bad!r}",
            )
            for bad in (0, "a", True, float("nan"))
        ),
        *(
            (lambda bad=bad: parallel().reduce(bad), ValueError, f"reduce: clip must be .* 0, or None, got {bad!r}")
            for bad in (-1, "a", float("nan"))
        ),
        *(
            (
                lambda bad=bad: list(parallel().leaves((xt.ones(1),), backwards=bad)),
                ValueError,
                rf"leaves: backwards must be a whole number in \[1, 2\*\*31\), or None, got {bad!r}",
            )
            for bad in ("a", 1.5, True, 0, 2**31)
        ),
        *(
            (
                lambda bad=bad: list(parallel().leaves(bad)),
                TypeError,
                f"leaves: batch must be several tensors or arrays of at least 1 dim, got {got}",
            )
            for bad, got in (
                (3, "int"),
                (None, "NoneType"),
                ((3,), "tuple with int"),
                ("a", "str with str"),
                (xt.ones(()), "Tensor"),
                ([xt.ones(())], "list with Tensor"),
            )
        ),
        (lambda: parallel(ema=3), TypeError, "DataParallel: ema must be an EMA or None, got int"),
        (lambda: parallel(overlap=3), TypeError, "DataParallel: overlap must be True, False or None, got 3"),
        (lambda: reduced().update("a"), TypeError, "update: guard must be a Tensor, got str"),
        (lambda: reduced().update(xt.ones(3)), ValueError, r"update: guard must have shape \(\), got \(3,\)"),
        (lambda: parallel().scale(3), TypeError, "scale: factors must be a dict of tensors by parameter, got int"),
        (lambda: parallel().scale({xt.ones(2): 3}), TypeError, "scale: factor 0 must be a Tensor, got int"),
        (lambda: parallel().of_leaves(3), TypeError, "of_leaves: values must be a list of tensors, got 3"),
        (lambda: parallel().of_leaves([3.0]), TypeError, "of_leaves: value 0 must be a Tensor, got float"),
        (
            lambda: xt.distributed.gather_json(b"x"),
            TypeError,
            "gather_json: value must be what JSON can hold, got bytes: .*",
        ),
        (
            lambda: parallel(max_ranks=2**70),
            ValueError,
            "DataParallel: max_ranks must be .*, got 1180591620717411303424",
        ),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        call()


@pytest.mark.parametrize("leaf", [0, 1])
def test_more_backwards_than_were_promised(leaf):
    """Are an error of the leaf that has them; fewer are none, and change no bit."""
    found = []
    for backwards in (None, 2, 3):
        xt.manual_seed(2)
        dp = parallel(max_ranks=2)
        for (rows,) in dp.leaves((xt.ones(2, 2),), backwards=backwards):
            for _ in range(2):
                dp.model(rows).square().sum().backward()
        found.append((dp.step().item(), [p.detach().tolist() for p in dp.model.parameters()]))
    assert found[0] == found[1] == found[2]
    said = (
        "leaves: backward must not be called more often for a leaf than `backwards` says: gradients came after they had"
    )
    dp = parallel(max_ranks=2)
    with pytest.raises(RuntimeError, match=f"^{said} been taken$"):
        for i, (rows,) in enumerate(dp.leaves((xt.ones(2, 2),), backwards=1)):
            for _ in range(1 + (i == leaf)):
                dp.model(rows).sum().backward()
    assert i == leaf


def test_a_step_is_taken_once():
    dp = parallel()
    for (rows,) in dp.leaves((xt.ones(2, 2),)):
        dp.model(rows).sum().backward()
    dp.reduce()
    dp.update()
    with pytest.raises(RuntimeError, match=r"^update: reduce\(\) must come before, got no gradients$"):
        dp.update()
    assert dp.steps == 1


def test_a_size_that_does_not_fit(monkeypatch):
    from xtrain.distributed import world

    monkeypatch.setattr(world, "world_size", lambda: 4)
    with pytest.raises(ConfigError, match="^max_ranks 12 must run on 1, 3, 6 or 12 processes, got 4$"):
        parallel(max_ranks=12)


def test_the_loop_of_the_readme(tmp_path):
    """On two processes, and they end with the same parameters."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    code = next(block for block in blocks if "DataParallel" in block)
    code = code.replace("range(100)", "range(2)").replace("seq_len=256", "seq_len=16")
    code += "import hashlib\nprint(*(hashlib.sha256(p.detach().numpy()).hexdigest() for p in model.parameters()), norm)"
    found = run_ranks(2, ["-c", code], tmp_path)
    assert [one.status for one in found] == [0, 0] and found[0].out == found[1].out != "", found
