"""Prompts of several lengths in one batch: each row as it is alone."""

from __future__ import annotations

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C
from xtrain.generation import KVCache, generate, generate_text, generate_texts, stream_texts, stream_tokens
from xtrain.models import GPT2, GPT2Config, Llama, LlamaConfig, Qwen3, Qwen3Config
from xtrain.tokenizers import ByteTokenizer

SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=128, initializer_range=0.3,
)  # fmt: skip
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], [90, 20, 20], [1, 2, 3, 4, 5, 6, 96]]
EOS = list(range(0, 97, 11))


def model(family: str = "qwen3", dtype=xt.float32, **options) -> xt.nn.Module:
    xt.manual_seed(8)
    if family == "gpt2":
        sizes = dict(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3)
        return GPT2(GPT2Config(**sizes | options), dtype=dtype)
    kind, config = (Llama, LlamaConfig) if family == "llama" else (Qwen3, Qwen3Config)
    return kind(config(**SIZES | options), dtype=dtype)


def new(out: xt.Tensor, row: int, width: int = 7) -> list[int]:
    return out.tolist()[row][width:]


@pytest.mark.on_cpu
@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_rows_have_the_bits_that_they_have_alone(family: str) -> None:
    """On a CPU with the naive product: the logits of the prompts and of each step, bit for bit."""
    one = model(family)
    seen: list[np.ndarray] = []
    one.register_forward_hook(lambda module, args, logits: seen.append(logits.numpy().copy()))
    with xt.use_gemm_backend("naive"):
        out = generate(one, PROMPTS, 12, temperature=0.0, eos=())
        batch, seen[:] = list(seen), []
        for row, prompt in enumerate(PROMPTS):
            alone = generate(one, [prompt], 12, temperature=0.0, eos=())
            assert alone.tolist()[0] == prompt + new(out, row)
            assert np.array_equal(batch[0][row, : len(prompt)], seen[0][0])
            assert all(np.array_equal(a[row], b[0]) for a, b in zip(batch[1:], seen[1:], strict=True))
            seen.clear()


@pytest.mark.parametrize("capture", [None, False, True])
@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_rows_have_the_tokens_that_they_have_alone(family: str, capture: bool | None) -> None:
    """In float64, where roundings are far smaller than the distance of two logits; ends of each row, streams, penalty."""
    one = model(family, xt.float64)
    for options in (dict(), dict(eos=EOS), dict(repetition_penalty=1.4)):
        options = dict(temperature=0.0, capture=capture, **options)
        out = generate(one, PROMPTS, 33, **options)
        rows = np.array(list(stream_tokens(one, PROMPTS, 33, **options))).T.tolist()
        for row, prompt in enumerate(PROMPTS):
            want = generate(one, prompt, 33, **options).tolist()[len(prompt) :]
            got = new(out, row)
            assert rows[row] == got == want + want[-1:] * (len(got) - len(want))


def test_sampling_repeats() -> None:
    """A seed; the first row draws as it does alone."""
    one = model(dtype=xt.float64)
    options = dict(seed=3, temperature=2.0, top_k=20, top_p=0.9)
    a, b = (generate(one, PROMPTS, 20, **options).tolist() for _ in range(2))
    assert a == b and a[0] == generate(one, PROMPTS[0], 20, **options).tolist()
    assert a == generate(one, PROMPTS, 20, capture=True, **options).tolist()


def test_what_comes_back() -> None:
    """int64 [B, S + new], on the left what pads: config.pad_token_id, else an end, else 0."""
    one = model()
    for ends, pad, want in ((None, None, 0), (7, None, 7), ([9, 7], None, 9), (7, 3, 3)):
        one.config.eos_token_id, one.config.pad_token_id = ends, pad
        out = generate(one, PROMPTS, 2, temperature=0.0)
        assert out.dtype is xt.int64
        assert [row[:7] for row in out.tolist()] == [[want] * (7 - len(prompt)) + prompt for prompt in PROMPTS]


def test_masks() -> None:
    """Ones at the tokens, on either side, as lists, arrays, tensors, of integers and bools; the values of padding stay."""
    one = model()
    want = generate(one, PROMPTS, 5, temperature=0.0)
    ids = np.zeros((4, 7), np.int64) + 42
    mask = np.zeros((4, 7), np.int64)
    right = ids.copy(), mask.copy()
    for row, prompt in enumerate(PROMPTS):
        ids[row, 7 - len(prompt) :], mask[row, 7 - len(prompt) :] = prompt, 1
        right[0][row, : len(prompt)], right[1][row, : len(prompt)] = prompt, 1
    for tokens, ones in (
        (ids, mask), right, (ids.tolist(), mask.tolist()), (xt.tensor(ids), xt.tensor(mask)), (ids, mask.astype(bool)),
    ):  # fmt: skip
        out = generate(one, tokens, 5, temperature=0.0, attention_mask=ones).tolist()
        assert [row[7:] for row in out] == [row[7:] for row in want.tolist()]
        assert [row[:7] for row in out] == ids.tolist()
    alone = generate(one, ids[1], 5, temperature=0.0, attention_mask=mask[1]).tolist()
    assert alone == [42] * 6 + generate(one, PROMPTS[1], 5, temperature=0.0).tolist()
    two = generate(one, ids[1:3, 2:], 5, temperature=0.0, attention_mask=np.repeat(mask[2:3, 2:], 2, 0)).tolist()
    assert two[0] == [42, 42, *generate(one, [42, 42, 3], 5, temperature=0.0).tolist()], "one length, padding before it"


def test_masks_that_are_refused() -> None:
    one = model()
    for mask, words in (
        ([[1, 1]], r"must have the shape of ids \(1, 3\), got \(1, 2\)"),
        ([[1], [1, 1]], "must be lists of one length, of numbers alone, got others"),
        ([[1, 2, 1]], "must be 1 for tokens and 0 for padding, got other values"),
        ([[1, 0, 1]], "must have the tokens of a row side by side, at least one, got 101 in row 0"),
        ([[0, 0, 0]], "must have the tokens of a row side by side, at least one, got 000 in row 0"),
    ):
        with pytest.raises(ValueError, match=f"^generate: attention_mask {words}$"):
            generate(one, [[1, 2, 3]], 1, attention_mask=mask)
    with pytest.raises(ValueError, match=r"got (10){32}\.\.\. in row 0$"):
        generate(one, [[1] * 90], 1, attention_mask=[[1, 0] * 45])
    for ids, error, words in (
        ([[1, 2], []], ValueError, "ids must have at least one token in every row, got none in row 1"),
        ([[1, 2], [1.0]], TypeError, "ids must have an integer dtype, got float64"),
        ([[1, 2], 3], ValueError, r"ids must have shape \(S,\) or \(B, S\) with S >= 1, got \(\)"),
        ([[1, 2], [[1, 2, 3]]], ValueError, r"ids must be rows of token ids, got shape \(1, 3\) in row 1"),
        ([[1], [1, 2], [1, [2]]], ValueError, "ids must be lists of one length, of numbers alone, got others$"),
        ([2**63], ValueError, "ids must be below 2\\^63, got 9223372036854775808$"),
    ):
        with pytest.raises(error, match=f"^generate: {words}"):
            generate(one, ids, 1)


@pytest.mark.on_cpu
def test_a_model_that_has_no_logits_of_last_tokens() -> None:
    """`forward` alone: of each row those of its own last token."""
    one = model(dtype=xt.float64)
    want = generate(one, PROMPTS, 9, temperature=0.0).tolist()
    one.last_logits = None
    assert generate(one, PROMPTS, 9, temperature=0.0).tolist() == want


def test_padding_is_no_token() -> None:
    """The repetition penalty does not know it: of a model that says what is not penalised."""
    one = model(dtype=xt.float64)
    one.config.pad_token_id = generate(one, PROMPTS[1], 1, temperature=0.0).tolist()[1]
    options = dict(temperature=0.0, repetition_penalty=1e9)
    assert new(generate(one, PROMPTS, 9, **options), 1) == generate(one, PROMPTS[1], 9, **options).tolist()[1:]


def test_rows_reach_the_limit_one_by_one() -> None:
    """Each drops the older half of its own context when that is full, as it does alone."""
    one = model(dtype=xt.float64, max_position_embeddings=16)
    for capture in (None, False, True):
        with pytest.warns(UserWarning, match="^generate: 16 tokens, max_position_embeddings, are full: the older half"):
            out = generate(one, PROMPTS, 40, temperature=0.0, capture=capture)
        for row, prompt in enumerate(PROMPTS):
            with pytest.warns(UserWarning, match="are full"):
                want = generate(one, prompt, 40, temperature=0.0, capture=False).tolist()
            assert new(out, row) == want[len(prompt) :]
    long = [list(range(40)), [3]]
    with pytest.warns(UserWarning, match="are full"):
        out = generate(one, long, 3, temperature=0.0)
    with pytest.warns(UserWarning, match="are full"):
        assert new(out, 0, 40) == generate(one, long[0], 3, temperature=0.0).tolist()[40:]
    assert new(out, 1, 40) == generate(one, [3], 3, temperature=0.0).tolist()[1:]


@pytest.mark.filterwarnings("ignore:generate. 16 tokens")
def test_numbers_behind_the_limit() -> None:
    """Each token has a random number of its own, whoever makes the steps."""
    one = model(dtype=xt.float64, max_position_embeddings=16)
    options = dict(seed=5, temperature=3.0)
    for count in (12, 40):
        want = generate(one, PROMPTS[0], count, capture=False, **options).tolist()
        assert want == generate(one, PROMPTS[0], count, **options).tolist()
        assert want == generate(one, PROMPTS, count, **options).tolist()[0]


def test_caches_of_others_are_refused() -> None:
    class Own(KVCache):
        pass

    one = model()
    one.make_caches = lambda batch, length: [Own(batch, length) for _ in range(2)]
    assert generate(one, [[1, 2], [3, 4]], 2, temperature=0.0).shape == (2, 4)
    with pytest.raises(
        ValueError, match="^generate: prompts of several lengths need caches of class KVCache, got Own$"
    ):
        generate(one, [[1, 2], [3]], 2, temperature=0.0)


# ---- text


@pytest.mark.on_cpu
def test_texts_end_one_by_one() -> None:
    """At stop texts, at end tokens and at the count; as each prompt alone."""
    xt.manual_seed(1)
    one = Qwen3(Qwen3Config(**SIZES | dict(vocab_size=256, initializer_range=0.5)), dtype=xt.float64)
    tokenizer = ByteTokenizer()
    prompts = [list(text) for text in (b"The quick", b"a", b"Gr\xc3\xbc\xc3\x9fe", b"xyz")]
    alone = [generate_text(one, tokenizer, prompt, 40, temperature=0.0) for prompt in prompts]
    stops = [alone[1][7:9], alone[2][20:22]]
    one.config.eos_token_id = tokenizer.encode(alone[3].encode())[20].item()
    for stop in ((), stops[0], stops):
        options = dict(temperature=0.0, stop=stop)
        want = [generate_text(one, tokenizer, prompt, 40, **options) for prompt in prompts]
        assert len({len(text) for text in want}) > 2
        assert generate_texts(one, tokenizer, prompts, 40, **options) == want
        shown = [""] * 4
        for row, piece in stream_texts(one, tokenizer, prompts, 40, **options):
            assert piece
            shown[row] += piece
        assert shown == [text[len(tokenizer.decode(p)) :] for text, p in zip(want, prompts, strict=True)]


@pytest.mark.on_cpu
def test_prompts_of_texts() -> None:
    one, tokenizer = model(), ByteTokenizer()
    with pytest.raises(ValueError, match="^generate_texts: prompts must be one or more, got none$"):
        generate_texts(one, tokenizer, [], 3)
    with pytest.raises(ValueError, match="^generate_text: ids must have at least one token, got none in prompt 1$"):
        stream_texts(one, tokenizer, [[1], []], 3)
    rule = r"ids must be in \[0, 97\), the model's vocab_size, got 122: the tokenizer has 256 tokens"
    for call, error, words in (
        (lambda: generate_text(one, tokenizer, tokenizer.encode(b"Az"), 3), ValueError, f"generate_text: {rule}"),
        (
            lambda: generate_text(one, tokenizer, "text", 3),
            TypeError,
            "generate: ids must be token ids, got str: a tok",
        ),
        (
            lambda: generate_texts(one, tokenizer, "text", 3),
            TypeError,
            "generate_texts: prompts must be lists of token",
        ),
        (lambda: generate_text(one, tokenizer, [1.5], 3), TypeError, "generate: ids must have an integer dtype"),
        (lambda: generate(one, "text", 3), TypeError, "generate: ids must be token ids, got str: a tokenizer's encode"),
    ):
        with pytest.raises(error, match=f"^{words}"):
            call()
    assert tokenizer.decode([65, 256, 300, -1, 66]) == "A\ufffd\ufffd\ufffdB", "tokens that the tokenizer has not"


# ---- the head of prompts


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_the_last_tokens(family: str, tied: bool) -> None:
    """What forward has there: of each sequence, or of the rows that are asked for."""
    one = model(family, xt.float64, tie_word_embeddings=tied).eval()
    ids = xt.tensor(np.random.default_rng(0).integers(0, 97, (3, 6)))
    with xt.no_grad():
        all_of_them = one(ids).cpu().numpy()
        last, some = one.last_logits(ids, None, None), one.last_logits(ids, None, None, xt.tensor([2, 11, 12]))
    assert np.abs(last.cpu().numpy() - all_of_them[:, -1]).max() < 1e-12
    assert np.abs(some.cpu().numpy() - all_of_them.reshape(18, 97)[[2, 11, 12]]).max() < 1e-12


def test_a_prompt_has_no_logits_before_its_end() -> None:
    """Unless somebody looks at them: hooks of the model or the head, another head, another forward."""
    seen: list[tuple[int, ...]] = []

    class Head(xt.nn.Linear):
        def forward(self, x):
            seen.append(tuple(x.shape))
            return super().forward(x)

    one = model(dtype=xt.float64, tie_word_embeddings=False)
    want = generate(one, PROMPTS, 3, temperature=0.0).tolist()
    before = _C.set_call_hook(lambda op, arguments, outs: seen.extend(tuple(x.shape) for x in outs))
    generate(one, PROMPTS, 3, temperature=0.0)
    _C.set_call_hook(before)
    assert {shape for shape in seen if shape[-1:] == (97,)} == {(4, 97), (4, 1, 97)}
    seen.clear()
    handle = one.lm_head.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    assert generate(one, PROMPTS, 3, temperature=0.0).tolist() == want and seen == [(28, 32), (4, 32), (4, 32)]
    handle.remove()
    seen.clear()
    one.register_forward_hook(lambda module, args, logits: seen.append(tuple(logits.shape)))
    assert generate(one, PROMPTS, 3, temperature=0.0).tolist() == want
    assert seen == [(4, 7, 97), (4, 1, 97), (4, 1, 97)]
    seen.clear()
    other = model(dtype=xt.float64, tie_word_embeddings=False)
    head = Head(32, 97, bias=False, dtype=xt.float64)
    head.load_state_dict(other.lm_head.state_dict())
    other.lm_head = head
    assert generate(other, PROMPTS, 2, temperature=0.0).tolist() == [row[:-1] for row in want] and len(seen) == 2


def test_lists_of_several_lengths_have_no_mask() -> None:
    with pytest.raises(
        ValueError, match=r"^generate: ids must have rows of one length with an attention_mask, got \[2, 1\]$"
    ):
        generate(model(), [[1, 2], [3]], 1, attention_mask=[[1, 1], [1]])


def test_ends_in_an_array() -> None:
    one = model()
    wanted = generate(one, PROMPTS, 9, temperature=0.0, eos=EOS).tolist()
    for ends in (np.array(EOS), xt.tensor(EOS)):
        assert generate(one, PROMPTS, 9, temperature=0.0, eos=ends).tolist() == wanted
