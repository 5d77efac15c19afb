# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What a user writes, with all of the public API in it. `make lint` checks its types strictly; test_types.py also runs it.

`assert_type` says what a call gives: a result that is Any, or of another type than a user expects, is an error there.
`refused` has calls that must be errors: the checker reports a comment that ignores nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import xtrain as xt
import xtrain.functional as F
from xtrain import data, generation, lora, models, nn, optim, profiling, saving, testing, tokenizers
from xtrain.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from xtrain.train import Callback, Result, TrainConfig, Trainer, train

if TYPE_CHECKING:
    from typing_extensions import assert_type
else:

    def assert_type(value, kind):
        return value


# ---- tensors ---------------------------------------------------------------------------------------------------------


def tensors() -> None:
    a = assert_type(xt.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True), xt.Tensor)
    b = xt.zeros(2, 2) + xt.ones((2, 2), dtype=xt.float32) * xt.full((2, 2), 0.5) - xt.randn(2, 2, dtype="float32")
    ids = xt.randint(0, 10, (2, 3))
    assert_type(a.shape, tuple[int, ...])
    assert_type(a.dtype, xt.dtype)
    assert_type(a.device, xt.device)
    assert ids.dtype == xt.int64 and a.device == xt.device("cpu") and a.dtype.is_floating_point
    c = assert_type(-(a @ b.T) / 2 + 1 - 3 * a**2, xt.Tensor)
    (c * 2).sum().backward()
    c = c.detach()
    c += 1.0
    first, second = assert_type(c.split(1), tuple[xt.Tensor, ...])
    rows = [row.sum() for row in c]
    values, places = c.max(1, keepdim=True)
    assert_type(values, xt.Tensor)
    assert_type(c.max(), xt.Tensor)
    mask = assert_type(c > 0, xt.Tensor)
    assert_type(xt.tril(c).gather(1, places) // 2 % 3, xt.Tensor)
    assert_type(c[[0, -1]].cumsum(0).norm(2, dim=1, keepdim=True), xt.Tensor)
    own = xt.Generator().manual_seed(3)
    assert_type(
        xt.outer(xt.rand(2, generator=own), xt.randn(3, generator=own)).index_select(0, places[:, 0]), xt.Tensor
    )
    d = xt.where(mask & ~c.isnan(), c, 0.0).clamp(min=-1.0).reshape(4).view(2, -1).permute(1, 0).mean((0, 1))
    joined = xt.cat([first, second], dim=1).unsqueeze(0).expand(3, 1, 4).contiguous()
    joined[..., 0] = 1.0
    array = assert_type(a.detach().numpy(), NDArray[Any])
    back = xt.from_numpy(np.ascontiguousarray(array))
    same = xt.from_dlpack(back)
    total = float(d) + int(places.sum()) + len(rows) + (1.0 if bool(mask.any()) else 0.0)
    assert_type(d.item(), int | float)
    assert math.isfinite(total) and same.to(xt.float64).cpu().dtype is xt.double
    assert_type(a.to("cpu", xt.bfloat16).float().grad, xt.Tensor | None)
    loss = F.cross_entropy(F.log_softmax(joined.view(3, 4)), xt.arange(3), reduction="sum")
    assert_type(loss + F.silu(c).sum() + F.gelu(c, "tanh").std(), xt.Tensor)
    heads = xt.randn(1, 2, 3, 4)
    y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    masked = F.scaled_dot_product_attention(heads, heads, heads, xt.tril(xt.ones(3, 3, dtype=xt.bool)), 0.1)
    bounds = assert_type(F.document_bounds([[1, 2]]), xt.Tensor)
    masked = masked + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True, documents=bounds, window=2)
    best = masked.topk(1)
    assert_type(best.values + xt.sort(masked).values[..., :1], xt.Tensor)
    assert_type(best.indices, xt.Tensor)
    y = F.rope(F.rms_norm(y.transpose(1, 2), 4), theta=1000.0)
    assert_type(F.dropout(F.swiglu(y), 0.1, training=True), xt.Tensor)
    assert_type(F.add_rms_norm(y, y, None, 1e-6), tuple[xt.Tensor, xt.Tensor])
    assert_type(F.add_layer_norm(y, y, bias=xt.zeros(4)), tuple[xt.Tensor, xt.Tensor])
    assert_type(F.layer_norm(y, 4, xt.ones(4), bias=xt.zeros(4), eps=1e-6), xt.Tensor)
    assert_type(F.sample(y.view(2, 12), xt.arange(2), 0.7, top_k=5, top_p=0.9), xt.Tensor)
    assert_type(xt.multinomial(xt.ones(3), 2), xt.Tensor)
    assert_type(F.qk_norm_rope(y, y, xt.ones(4), xt.ones(4), theta=1e6), tuple[xt.Tensor, xt.Tensor])


# ---- gradients -------------------------------------------------------------------------------------------------------


class Square(xt.Function):
    @staticmethod
    def forward(ctx: xt.autograd.FunctionContext, x: xt.Tensor) -> xt.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = 2.0
        return x * x

    @staticmethod
    def backward(ctx: xt.autograd.FunctionContext, dy: xt.Tensor) -> xt.Tensor:
        (x,) = ctx.saved_tensors
        return ctx.scale * x * dy


@xt.no_grad()
def norm(tensor: xt.Tensor) -> float:
    return float((tensor * tensor).sum().sqrt())


def double(gradient: xt.Tensor) -> xt.Tensor:
    return gradient * 2


def gradients() -> None:
    x = xt.randn(3, requires_grad=True)
    y: xt.Tensor = Square.apply(x)
    handle = y.register_hook(double)
    y.backward(xt.ones_like(y))
    handle.remove()
    assert x.grad is not None and assert_type(norm(x.grad), float) > 0
    with xt.no_grad(), xt.enable_grad(), xt.set_grad_enabled(False):
        assert not assert_type(xt.is_grad_enabled(), bool)
    with xt.inference_mode():
        assert not assert_type(x * 2, xt.Tensor).requires_grad
    assert_type(xt.checkpoint(F.relu, x), xt.Tensor)
    check = testing.grad_check(F.silu, [xt.randn(4, dtype=xt.float64, requires_grad=True)])
    testing.assert_close(x, x.clone())
    assert assert_type(check.ok, bool) and testing.verify(x, x).ok


# ---- a model of layers -----------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: xt.Tensor, scale: float = 1.0) -> xt.Tensor:
        return self.dropout(self.down(F.silu(self.up(self.norm(x))))) * scale


class Classifier(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, streams: int) -> None:
        self.table = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.HyperConnection(width, streams, Mlp(width), iters=5) for _ in range(layers))
        self.contraction = nn.StreamContraction(width, streams, "learned")
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, vocabulary))
        self.streams, self.recompute = streams, False
        self.register_buffer("seen", xt.zeros(1))

    def forward(self, ids: xt.Tensor) -> xt.Tensor:
        x = nn.expand_streams(self.table(ids), self.streams)
        if self.recompute:
            x = nn.recompute_streams(self.layers, x, 0.5)
        else:
            for layer in self.layers:
                x = layer(x, scale=0.5)
        return self.head(self.contraction(x))


def count(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
    print(type(module).__name__, len(args), type(result).__name__)


def layers() -> None:
    model = Classifier(11, 8, layers=2, streams=4)
    assert_type(model(xt.arange(5)), xt.Tensor)
    assert_type(model.layers[0], nn.HyperConnection)
    assert_type(model.layers[0].gamma, nn.Parameter | None)
    assert_type(Mlp(4)(xt.randn(2, 4), scale=0.5), xt.Tensor)
    h_in, state = model.layers[0].read(xt.randn(5, 4, 8))
    assert_type(model.layers[0].write(state, h_in), xt.Tensor)
    linear = nn.Linear(2, 3, dtype=xt.float32)
    assert_type(linear.bias, nn.Parameter | None)
    assert_type(linear(xt.randn(4, 2)), xt.Tensor)
    assert_type(nn.Embedding(3, 4)(xt.arange(3)), xt.Tensor)
    assert_type(nn.SiLU()(nn.GELU()(nn.Dropout(0.5)(nn.LayerNorm(4)(nn.RMSNorm((4,))(xt.randn(2, 4)))))), xt.Tensor)
    assert_type(nn.Sequential(linear, nn.SiLU())(xt.randn(4, 2)), Any)
    assert_type(nn.Sequential(linear, nn.SiLU())[0], nn.Module)
    conv = nn.Conv1d(4, 4, (3,), padding="causal", groups=4, dtype="float32")
    assert_type(conv.bias, nn.Parameter | None)
    assert_type(conv(xt.randn(2, 4, 5)), xt.Tensor)
    assert_type(F.conv1d(xt.randn(2, 4, 5), conv.weight, stride=2, padding="valid", groups=4), xt.Tensor)
    assert_type(F.causal_conv1d(xt.randn(2, 5, 4), conv.weight, conv.bias, "silu"), xt.Tensor)
    assert_type(F.causal_conv1d(xt.randn(2, 5, 4), conv.weight, state=xt.zeros(2, 2, 4)), tuple[xt.Tensor, xt.Tensor])
    parts = nn.ModuleDict({"up": linear, "down": nn.Linear(3, 2)})
    assert_type(parts["up"](xt.randn(4, 2)), xt.Tensor)
    assert_type(nn.Identity()(nn.ReLU()(xt.randn(2))), xt.Tensor)
    assert_type(nn.CrossEntropyLoss(label_smoothing=0.1)(xt.randn(2, 3), xt.arange(2)), xt.Tensor)
    assert_type(nn.utils.parameters_to_vector(linear.parameters()), xt.Tensor)
    linear.register_forward_pre_hook(lambda module, args: None).remove()
    handle = model.layers[0].register_forward_hook(count)
    nn.init.normal_(model.table.weight, std=0.02)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    scheduler = optim.LRScheduler(adamw, lambda step: 1.0 / (1 + step))
    for step in range(3):
        model.train().recompute = step == 2
        loss = F.cross_entropy(model(xt.arange(5)), xt.arange(5))
        adamw.zero_grad()
        loss.backward()
        assert_type(optim.clip_grad_norm_(model.parameters(), 1.0), xt.Tensor)
        adamw.step()
        scheduler.step()
    handle.remove()
    adamw.param_groups[0]["lr"] = optim.lr_schedule("cosine", 3, warmup=1, total=10, base=1e-2)
    muon = optim.Muon(matrices, lr=1e-2, ns_dtype="float32")
    chain = optim.ChainedOptimizer([muon, optim.AdamW(vectors)])
    ema = optim.EMA(model.parameters(), 0.9, chain)
    chain.step()
    ema.update()
    assert_type(ema.step, int)
    assert_type(chain.interrupted(), bool)
    assert_type(chain.state_dict(), dict[str, Any])
    sgd = optim.SGD(model.eval().parameters(), lr=0.1, momentum=0.9)
    sgd.load_state_dict(sgd.state_dict())
    adam = optim.Adam(model.parameters(), lr=1e-2)
    warm = optim.lr_scheduler.LinearLR(adam, 0.1, total_iters=2)
    optim.lr_scheduler.SequentialLR(adam, [warm, optim.lr_scheduler.CosineAnnealingLR(adam, 5)], [2]).step()
    assert_type(warm.get_last_lr(), list[float])
    missing, unexpected = model.load_state_dict(model.state_dict(), strict=False)
    names = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_modules()]
    assert not missing and not unexpected and assert_type(names, list[str])
    assert_type(model.to(xt.bfloat16).requires_grad_(False), Classifier)


# ---- language models -------------------------------------------------------------------------------------------------


def batches(corpus: data.Corpus) -> Iterator[tuple[xt.Tensor, xt.Tensor]]:
    return iter(corpus.loader(batch_size=2, seq_len=16, seed=1))


def language_model(folder: Path, text: Path) -> None:
    config = models.Qwen3Config(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True, mhc_streams=2,
    )  # fmt: skip
    model = models.Qwen3(config, dtype=xt.float32)
    model.stream_checkpointing = 2
    adamw = optim.AdamW(model.parameters(), lr=1e-3)
    for _, (ids, targets) in zip(range(2), batches(data.open_data(text)), strict=False):
        assert_type(model(ids), xt.Tensor)
        loss = assert_type(model.loss(ids, targets), xt.Tensor)
        adamw.zero_grad()
        loss.backward()
        adamw.step()
    gemma = models.Gemma2Config(vocab_size=64, hidden_size=16, num_hidden_layers=1, final_logit_softcapping=None)
    assert_type(gemma.attn_logit_softcapping, float | None)
    llama = models.Llama(models.LlamaConfig(vocab_size=256, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    clip = optim.QKClip(llama, 100.0, optim.Muon([llama.model.layers[0].self_attn.q_proj.weight], lr=1e-2))
    maxima = assert_type(clip.measure(lambda: llama.features(xt.zeros((1, 4), dtype=xt.int64))), list[list[float]])
    clip.step(maxima)
    assert_type(llama.model.layers[0].self_attn.qk_heads(), optim.AttentionHeads)
    mixture = data.open_data({text: 3, "python": 1})
    assert_type(mixture.shares, list[float])
    assert_type(mixture.val_set(16, 64, documents=False)[3], list[int])
    assert_type(model.lm_head, nn.Linear | None)
    assert_type(model.model.layers[0].self_attn.q_proj.weight.grad, xt.Tensor | None)
    assert assert_type(model.num_parameters(), int) and assert_type(model.flops_per_token(16), int)

    def stream(tokens: list[int]) -> None:
        print(tokens)

    tokenizer = tokenizers.ByteTokenizer()
    out = model.generate(list(b"def "), 3, temperature=0.7, top_k=40, stream=stream)
    assert_type(out, xt.Tensor)
    assert_type(generation.generate(model, out, 2, temperature=0.0, eos=tokenizer.eos), xt.Tensor)
    for tokens in generation.stream_tokens(model, out, 2, repetition_penalty=1.2, capture=False):
        assert_type(tokens, list[int])
    for piece in generation.stream_text(model, tokenizer, tokenizer.encode(b"def "), 3, stop="\n", seed=1):
        assert_type(piece, str)
    assert_type(generation.generate_text(model, tokenizer, tokenizer.encode(b"def "), 3, seed=1), str)
    assert_type(generation.generate(model, [[1, 2, 3], [4]], 2, seed=1), xt.Tensor)
    assert_type(generation.generate_texts(model, tokenizer, [[1, 2, 3], [4]], 2, seed=1), list[str])
    for row, piece in generation.stream_texts(model, tokenizer, [[1, 2, 3], [4]], 2, seed=1):
        assert_type(row, int)
        assert_type(piece, str)

    xt.save(model.state_dict(), folder / "state.safetensors", metadata={"step": "2"})
    assert_type(xt.load(folder / "state.safetensors", "cpu"), dict[str, xt.Tensor])
    model.save_pretrained(folder / "model")
    saving.save_model(model, folder / "again", tokenizer=tokenizer)
    loaded = assert_type(models.Qwen3.from_pretrained(folder / "model", dtype=xt.bfloat16), models.Qwen3)
    assert_type(loaded.config, models.Qwen3Config)
    tuned = assert_type(lora.apply(loaded, r=2, target_modules=["q_proj"]), models.Qwen3)
    lora.save(tuned, folder / "lora")
    lora.apply(models.Qwen3(loaded.config), lora.LoraConfig(r=2, lora_alpha=4))
    assert_type(lora.unload(lora.unmerge(lora.merge(lora.load(tuned, folder / "lora")))), models.Qwen3)
    any_model = assert_type(saving.load_model(folder / "again"), models.LanguageModel)
    assert_type(any_model.loss(out[None, :-1], out[None, 1:]), xt.Tensor)
    saving.save_checkpoint(folder / "checkpoint", model, adamw, {"step": 2}, tokenizer)
    state = saving.load_checkpoint(folder / "checkpoint", model, adamw)
    kept = assert_type(tokenizers.load_tokenizer(folder / "again"), tokenizers.Tokenizer)
    assert state["step"] == 2 and kept.eos == tokenizer.eos
    assert_type(models.Qwen3Config.from_json(folder / "model"), models.Qwen3Config)


# ---- training --------------------------------------------------------------------------------------------------------


def profiled(folder: Path) -> None:
    with xt.profile(folder / "trace.json") as found, profiling.span("mine", number=1):
        xt.ones(3).sum()
    assert_type(found, xt.profile)
    assert assert_type(found.table(), str) and assert_type(found.roots, list[profiling.Event])[0].name == "mine"


def training(folder: Path, text: Path) -> None:
    options: dict[str, Any] = dict(data=str(text), steps=2, batch_size=2, seq_len=16, plot=False, device="cpu")
    small = {"preset": "tiny", "hidden_size": 32}
    hear: list[Callback] = [Callback()]
    result = train(**options, model=small, out=str(folder / "run"), optim={"lr": 1e-3}, quiet=True, callbacks=hear)
    assert_type(result, Result)
    assert_type(result.val_bpb, float | None)
    assert assert_type(result.checkpoint, Path | None) == folder / "run" / saving.checkpoint_name(2)
    again = TrainConfig(**options, out=str(folder / "second"))
    again.model.preset, again.optim.lr = "tiny", 2e-3
    trainer = Trainer(again, quiet=True)
    metrics = assert_type(trainer.train_step(), dict[str, float])
    assert metrics["loss"] > 0 and trainer.step == 1
    assert_type(trainer.model, models.LanguageModel)
    assert_type(trainer.save(), Path)


def mistakes(folder: Path) -> list[str]:
    def fails(call: Callable[[], object]) -> str:
        try:
            call()
        except (ConfigError, DataError, CheckpointError, NonFiniteError) as error:
            return str(error)
        except (xt.OutOfMemoryError, xt.CudaError) as error:
            return f"device: {error}"
        raise AssertionError("no error")

    return [
        fails(lambda: train(stepz=1)),
        fails(lambda: saving.load_model(folder / "nothing")),
        fails(lambda: data.open_data(folder / "nothing")),
    ]


def refused(model: models.Qwen3, connection: nn.HyperConnection, adamw: optim.AdamW, x: xt.Tensor) -> None:
    """Nobody calls this."""
    train(model, callbacks=["csv"])  # pyright: ignore[reportArgumentType]
    lora.apply("model")  # pyright: ignore[reportArgumentType]
    nn.Linear(2, 3)("x")  # pyright: ignore[reportArgumentType]
    nn.Linear("2", 3)  # pyright: ignore[reportArgumentType]
    nn.Embedding(2, 3, bias=True)  # pyright: ignore[reportCallIssue]
    nn.RMSNorm(4)(x, x)  # pyright: ignore[reportCallIssue]
    nn.Dropout("0.5")  # pyright: ignore[reportArgumentType]
    nn.SiLU()(1.0)  # pyright: ignore[reportArgumentType]
    nn.GELU(True)  # pyright: ignore[reportArgumentType]
    Mlp(4)(x, scale="1")  # pyright: ignore[reportArgumentType]
    connection.read([x])  # pyright: ignore[reportArgumentType]
    connection.write(x, x)  # pyright: ignore[reportArgumentType]
    nn.StreamContraction(8, 4)(8)  # pyright: ignore[reportArgumentType]
    nn.expand_streams(x, "4")  # pyright: ignore[reportArgumentType]
    nn.recompute_streams([x], x)  # pyright: ignore[reportArgumentType]
    models.Qwen3({"vocab_size": 256})  # pyright: ignore[reportArgumentType]
    model.loss(x)  # pyright: ignore[reportCallIssue]
    model(x, caches=[x])  # pyright: ignore[reportArgumentType]
    model.stream_checkpointing = "2"  # pyright: ignore[reportAttributeAccessIssue]
    model.load_state_dict([x])  # pyright: ignore[reportArgumentType]
    model.to(3)  # pyright: ignore[reportArgumentType]
    adamw.step(guard=1.0)  # pyright: ignore[reportArgumentType]
    optim.Muon([x], ns_dtype=16)  # pyright: ignore[reportArgumentType]
    optim.ChainedOptimizer(["adamw"])  # pyright: ignore[reportArgumentType]
    optim.EMA([x], "0.9")  # pyright: ignore[reportArgumentType]
    x.sum("0")  # pyright: ignore[reportArgumentType]
    F.rope(x, 1000.0)  # pyright: ignore[reportCallIssue]
    F.add_rms_norm(x)  # pyright: ignore[reportCallIssue]
    F.add_layer_norm(x)  # pyright: ignore[reportCallIssue]
    F.conv1d(x)  # pyright: ignore[reportCallIssue]
    F.conv1d(x, x, stride=1.5)  # pyright: ignore[reportArgumentType]
    F.causal_conv1d(x, x, state=1)  # pyright: ignore[reportCallIssue, reportArgumentType]
    nn.Conv1d(2, 3, "x")  # pyright: ignore[reportArgumentType]
    testing.Convolution(1, 2, 3, 4.5, 1)  # pyright: ignore[reportArgumentType]
    F.qk_norm_rope(x, x, x, x, 1e-6, 1000.0)  # pyright: ignore[reportCallIssue]
    xt.zeros("2")  # pyright: ignore[reportArgumentType]
    xt.cuda.synchronize(1.5)  # pyright: ignore[reportArgumentType]
    xt.cuda.peak_flops(16)  # pyright: ignore[reportArgumentType]
    xt.cuda.graph(3)  # pyright: ignore[reportArgumentType]
    xt.cuda.graph(adamw.step)(2)  # pyright: ignore[reportArgumentType]
    saving.load_model(None)  # pyright: ignore[reportArgumentType]
    Trainer([1])  # pyright: ignore[reportArgumentType]


def squares(x: xt.Tensor) -> tuple[xt.Tensor, xt.Tensor]:
    return x * x, x.sum()


def devices() -> None:
    graph = xt.cuda.graph(squares, warmup=1, device="cuda")
    assert_type(graph.captured, bool)
    if xt.cuda.is_available():
        assert_type(graph(xt.ones(3)), tuple[xt.Tensor, xt.Tensor])
        graph.capture(xt.ones(3))
        assert_type((graph.launches, graph.memory), tuple[int, int])
        xt.cuda.synchronize()
        assert_type(xt.cuda.get_device_capability(0), tuple[int, int])
        assert_type(xt.cuda.peak_flops("tf32"), int | None)
        print(xt.cuda.get_device_name(), xt.cuda.memory_allocated("cuda:0"), xt.cuda.memory_summary())
    assert_type(xt.cuda.why_unavailable(), str | None)
    xt.set_num_threads(xt.get_num_threads())
    xt.set_float32_matmul_precision(xt.get_float32_matmul_precision())
    with xt.use_gemm_backend(xt.gemm_backends()[0]), xt.use_attention_backend("auto"):
        assert_type(xt.matmul(xt.ones(2, 2), xt.ones(2, 2)), xt.Tensor)


def main(folder: Path) -> None:
    xt.manual_seed(0)
    text = folder / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 100)
    tensors()
    gradients()
    layers()
    language_model(folder, text)
    profiled(folder)
    training(folder, text)
    print(*mistakes(folder), sep="\n")
    devices()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
