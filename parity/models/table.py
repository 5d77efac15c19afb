"""The table of parity: every family of models against transformers, on one device.

    python parity/models/table.py [--device cuda] [--configs 10] [--prompts 20] [--tokens 64]

A line per family and precision, over random models of `--configs` shapes (parity/support/hf_families.py): the largest error of logits and of
gradients relative to the largest value, with B = 3, and of rows of three lengths (padding on the right and a mask there, on the left and
a mask for the logits of theirs); on a GPU the gradients of a captured step, too. In bfloat16 the errors are given in PyTorch's own: ours
against float32 over theirs against float32. Files: models whose tensors and keys of config.json come back bit for bit from transformers
-> xtrain -> transformers. Greedy: continuations of `--prompts` prompts with exactly the tokens of transformers, in float32, alone and in
ragged batches of 4; step by step and with captured steps. Greedy in bfloat16, with captured steps, alone and in batches of 4: each row is
compared up to its first other token, which must be a tie: by the float32 model of the same weights, the tokens of both sides are less
below the likeliest one than twice the largest error of PyTorch's bfloat16 logits there. What follows a tie is another text, and does not
count. On a GPU, steps of Llama, Mistral and Qwen3 are one op, `decoder_step`, or that is wrong. The exit status is 1 when something is not
within its limit.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from hf_families import FAMILIES, SHAPES, build, data, numbers, ours_on, relative, theirs_on

import xtrain as xt
from xtrain import models

LIMITS = {"float32": (1e-5, 1e-4), "bfloat16": (2.0, 2.0)}  # of logits and gradients
LENGTHS = (33, 7, 20)  # of the rows of a ragged batch
WRONG: list[str] = []


def wrong(text: str) -> None:
    WRONG.append(text)
    print("WRONG", text, flush=True)


def loaded(theirs: torch.nn.Module) -> models.LanguageModel:
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return models.load(folder)


def gradient_error(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest of all tensors. A gradient that is zero but for roundings (of a key's bias: attention does not change
    when all scores of a query do) counts relative to the largest of all.
    """
    if set(ours) != set(theirs):
        raise ValueError(f"gradients of {sorted(set(ours) ^ set(theirs))} are on one side only")
    scale = max(float(np.abs(g).max()) for g in theirs.values())
    errors = []
    for name, want in theirs.items():
        if name.endswith("k_proj.bias") and np.abs(want).max() < 1e-6 * scale:
            errors.append(100 * float(np.abs(ours[name]).max()) / scale)  # within 1e-6 of it
        else:
            errors.append(relative(ours[name], want))
    return max(errors)


def ragged_logits(ours: models.LanguageModel, theirs: torch.nn.Module, ids: np.ndarray) -> list[tuple[Any, Any]]:
    """(ours, theirs) of the tokens of rows of several lengths: theirs with padding on the left, and on the right."""
    mask = (np.arange(ids.shape[1]) < np.array(LENGTHS)[:, None]).astype(np.int64)
    got = ours(xt.tensor(ids)).detach().float().cpu().numpy()
    pairs = []
    for left in (False, True):
        tokens, seen = ids.copy(), mask
        if left:
            seen = mask[:, ::-1].copy()
            for row, count in zip(tokens, LENGTHS, strict=True):
                row[:] = np.roll(row, len(row) - count)
        places = np.maximum(seen.cumsum(1) - 1, 0)
        with torch.no_grad():
            inputs = dict(input_ids=tokens, attention_mask=seen, position_ids=places)
            want = numbers(theirs(**{name: torch.tensor(value) for name, value in inputs.items()}).logits)
        for row, count in enumerate(LENGTHS):
            pairs.append((got[row, :count], want[row, seen[row].astype(bool)]))
    return pairs


def captured_gradients(ours: models.LanguageModel, ids: np.ndarray, targets: np.ndarray) -> dict[str, Any]:
    """Of the fourth call of a step, which replays a captured one."""
    optimizer = xt.optim.AdamW(ours.parameters(), lr=0.0, weight_decay=0.0)

    def step(x: xt.Tensor, y: xt.Tensor) -> xt.Tensor:
        optimizer.zero_grad()
        loss = ours.loss(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    graph = xt.cuda.graph(step, optimizers=[optimizer])
    for _ in range(4):
        graph(xt.tensor(ids), xt.tensor(targets))
    if not graph.captured:
        raise RuntimeError("the step was not captured")
    return {name: p.grad.float().cpu().numpy() for name, p in ours.named_parameters()}


def in_float32(family: str, index: int) -> dict[str, float]:
    theirs = build(family, index)
    ours = loaded(theirs)
    ids, targets = data(theirs.config.vocab_size)
    for row, count in enumerate(LENGTHS):
        targets[row, count:] = -100
    logits, _, grads = ours_on(ours, ids, targets)
    want, _, want_grads = theirs_on(theirs, ids, targets)
    found = dict(logits=relative(logits, want), gradients=gradient_error(grads, want_grads))
    found["ragged"] = max(relative(*pair) for pair in ragged_logits(ours, theirs, ids))
    if xt.get_default_device().type == "cuda":
        found["captured"] = gradient_error(captured_gradients(ours, ids, targets), want_grads)
    return found


def in_bfloat16(family: str, index: int) -> dict[str, float]:
    """Errors over PyTorch's own: of logits by their norm, of gradients by the median of all tensors."""
    theirs = build(family, index).to(torch.bfloat16)
    ours = loaded(theirs)
    if ours.config.dtype != "bfloat16":
        raise ValueError(f"config.dtype must be bfloat16, got {ours.config.dtype}")
    ids, targets = data(theirs.config.vocab_size)
    got, their = ours_on(ours, ids, targets), theirs_on(theirs, ids, targets)
    mine = [got]
    if xt.get_default_device().type == "cuda":
        mine.append((got[0], got[1], captured_gradients(ours, ids, targets)))
    exact = theirs_on(theirs.float(), ids, targets)

    def error(run: tuple[np.ndarray, Any, dict[str, Any]]) -> np.ndarray:
        names = [name for name in exact[2] if "k_proj.bias" not in name]
        parts = [np.linalg.norm(run[2][n] - exact[2][n]) / np.linalg.norm(exact[2][n]) for n in names]
        return np.array([np.linalg.norm(run[0] - exact[0]), np.median(parts)])

    ratios = [error(run) / error(their) for run in mine]
    found = dict(logits=float(ratios[0][0]), gradients=float(ratios[0][1]))
    return found | ({"captured": float(ratios[1][1])} if len(ratios) > 1 else {})


def comes_back(family: str, index: int, dtype: str) -> tuple[int, int]:
    """How many tensors and keys a model has; an error for one that does not come back."""
    theirs = build(family, index).to(getattr(torch, dtype))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / side for side in ("hf", "xt")]
        theirs.save_pretrained(paths[0])
        models.load(paths[0]).save_pretrained(paths[1])
        again, info = type(theirs).from_pretrained(paths[1], output_loading_info=True, dtype="auto")
        tensors = [load_file(path / "model.safetensors", device="cpu") for path in paths]
        keys = [json.loads((path / "config.json").read_text()) for path in paths]
    lost = [kind for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[kind]]
    before, after = theirs.state_dict(), again.state_dict()
    pairs = [(name, value, side[name]) for one, side in ((before, after), tensors) for name, value in one.items()]
    lost += [name for name, a, b in pairs if a.dtype != b.dtype or bits(a) != bits(b)]
    lost += [name for one, side in ((before, after), tensors) for name in set(one) ^ set(side)]
    lost += [key for key, value in keys[0].items() if key not in keys[1] or keys[1][key] != value]
    if lost:
        raise ValueError(f"{', '.join(lost)} of {dtype} did not come back")
    return len(tensors[0]), len(keys[0])


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def greedy(family: str, prompts: int, tokens: int) -> dict[str, str]:
    """Of all prompts the number whose tokens are those of transformers: alone and in batches of 4."""
    rng, right, count = np.random.default_rng(11), {}, 0
    ways = {"steps": False, "captured": True}
    if xt.get_default_device().type == "cpu":
        ways["default"] = None
    for index in (3, 8):
        theirs = build(family, index)
        ours, mine = loaded(theirs), prompts // 2 if index == 3 else prompts - prompts // 2
        rows = [rng.integers(0, theirs.config.vocab_size, rng.integers(1, 40)).tolist() for _ in range(mine)]
        count += mine
        for batch in (1, 4):
            for start in range(0, mine, batch):
                some = rows[start : start + batch]
                want = their_tokens(theirs, some, tokens)
                for way, capture in ways.items():
                    out = ours.generate(some, tokens, temperature=0.0, eos=(), capture=capture).cpu().numpy()
                    same = (out[:, -tokens:] == want).all(1).sum() if tokens else 0
                    right[batch, way] = right.get((batch, way), 0) + int(same)
    for (batch, way), number in right.items():
        if number != count:
            wrong(f"{family}: greedy, batch {batch}, {way}: {count - number} of {count} differ")
    return {f"{way} {batch}": f"{number}/{count}" for (batch, way), number in right.items()}


WIDE = dict(
    hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=320, vocab_size=512
)
ONE_OP = ("Llama", "Mistral", "Qwen3")  # families whose step on a GPU is decoder_step


def greedy_bfloat16(family: str, prompts: int, tokens: int) -> str:
    """How many greedy tokens of bfloat16 are those of transformers, up to the first tie of a row."""
    changes = {key: value for key, value in WIDE.items() if (family, key) != ("Qwen2", "head_dim")}
    theirs = build(family, 0, **changes).to(torch.bfloat16)
    ours, exact = loaded(theirs), copy.deepcopy(theirs).float()
    rng, cells, trunk = np.random.default_rng(12), [], models.decoder.Trunk
    rows = [rng.integers(0, theirs.config.vocab_size, rng.integers(1, 40)).tolist() for _ in range(prompts)]
    asked, taken = trunk.step_arguments, []
    try:
        trunk.step_arguments = lambda *args: taken.append(found := asked(*args)) or found
        for batch in (1, 4):
            equal, ties = 0, 0
            for start in range(0, prompts, batch):
                some = rows[start : start + batch]
                got = ours.generate(some, tokens, temperature=0.0, eos=(), capture=True).cpu().numpy()[:, -tokens:]
                for prompt, mine, want in zip(some, got, their_tokens(theirs, some, tokens), strict=True):
                    same = int((mine != want).argmax()) if (mine != want).any() else tokens
                    equal += same
                    if same == tokens:
                        continue
                    ties += 1
                    gap, error = tie(theirs, exact, [*prompt, *want[:same]], (mine[same], want[same]))
                    if not gap <= 2 * error:
                        wrong(f"{family}: greedy bfloat16, batch {batch}: token {same} is {gap:.3g} off, {error:.3g}")
            cells.append(f"batch {batch}: {equal} tokens equal, {ties} of {prompts} rows to a tie")
    finally:
        trunk.step_arguments = asked
    if xt.get_default_device().type == "cuda" and family in ONE_OP and not any(taken):
        wrong(f"{family}: greedy bfloat16: no step was decoder_step")
    return ("one op a step  " if any(taken) else "") + "  ".join(cells)


def tie(theirs: torch.nn.Module, exact: torch.nn.Module, ids: list[int], pair: tuple[int, int]) -> tuple[float, float]:
    """Of the token after ids: how far the float32 logits of a pair are below the largest, and the largest error of the
    bfloat16 logits.
    """
    with torch.no_grad():
        narrow, wide = (numbers(model(input_ids=torch.tensor([ids])).logits[0, -1]) for model in (theirs, exact))
    return float(wide.max() - wide[list(pair)].min()), float(np.abs(narrow - wide).max())


def their_tokens(model: torch.nn.Module, rows: list[list[int]], tokens: int) -> np.ndarray:
    width = max(map(len, rows))
    ids, mask = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.int64)
    for row, prompt in enumerate(rows):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
    out = model.generate(
        torch.tensor(ids), attention_mask=torch.tensor(mask), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    return out[:, width:].cpu().numpy()


def guarded(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """What a call gives; an error is something wrong, and gives None."""
    try:
        return call(*args)
    except Exception as error:
        wrong(f"{name}: {type(error).__name__}: {error}")
        return None


def lines(family: str, configs: int, prompts: int, tokens: int, device: str) -> None:
    for precision, judge in (("float32", in_float32), ("bfloat16", in_bfloat16)):
        found = [guarded(f"{family} {i} {precision}", judge, family, i) for i in range(configs)]
        worst: dict[str, float] = {}
        for i, errors in enumerate(found):
            for name, error in (errors or {}).items():
                limit = LIMITS[precision][name in ("gradients", "captured")]
                if not error <= limit:
                    wrong(f"{family} {i} {precision}: {name} {error:.3g}, limit {limit:g}")
                worst[name] = max(worst.get(name, 0.0), error)
        unit = "of PyTorch's error" if precision == "bfloat16" else "relative"
        cells = "  ".join(f"{name} {error:.2g}" for name, error in worst.items())
        print(f"{family:8} {precision:9} {device}  {len(found):2} configs  {cells}  {unit}", flush=True)
    configs = configs if device == "cpu" else min(configs, 2)  # files are the host's
    for dtype in ("float32", "bfloat16", "float16"):
        back = [one for i in range(configs) if (one := guarded(f"{family} {i} files", comes_back, family, i, dtype))]
        total = [sum(column) for column in zip(*back, strict=True)] or [0, 0]
        print(
            f"{family:8} {dtype:9} files  {len(back)}/{configs} models, {total[0]} tensors and {total[1]} keys the same"
        )
    if prompts:
        counts = guarded(f"{family} greedy", greedy, family, prompts, tokens) or {}
        cells = "  ".join(f"{name}: {value}" for name, value in counts.items())
        print(f"{family:8} float32   {device}  greedy, {tokens} tokens: {cells}", flush=True)
        found = guarded(f"{family} greedy bfloat16", greedy_bfloat16, family, prompts, tokens)
        print(f"{family:8} bfloat16  {device}  greedy, {tokens} tokens: {found}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default=None, help="cpu or cuda; default: that of the process, cpu")
    parser.add_argument("--theirs", help="the device of transformers; default: the same")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--configs", type=int, default=len(SHAPES))
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.device:
        xt.set_default_device(args.device)
        torch.set_default_device(args.theirs or args.device)
    start, device = time.perf_counter(), str(xt.get_default_device())
    WRONG.clear()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, device {device}")
    for family in args.families.split(","):
        lines(family, args.configs, args.prompts, args.tokens, device)
    print(f"{f'WRONG: {len(WRONG)}' if WRONG else 'all within their limits'}, {time.perf_counter() - start:.0f} s")
    return bool(WRONG)


if __name__ == "__main__":
    sys.exit(main())
