"""Times what cuBLASLt's heuristic offers for the products of training steps on one GPU: what cuda/gemm/cublas_choice.cuh picks from.

    python parity/bench/gpu_algorithms.py [--models 0.6B,wide,...] [--dtype bfloat16] [--offers 8] [--rounds 4] [--search 40] [--json FILE]

Products are those of a layer's matrices: forward x W^T, gradient of x, and of W (a sum over tokens), on random data. Each line has the first
offer, what its rule picks, and the fastest: place among the offers, ms, TFLOP/s and, in brackets, tile, custom option, cluster
and splits along K (numbers of cublasLtMatmulAlgoConfigAttributes_t). "bits" counts the offers whose results have the first one's bits. Offers
take turns, so that all of them meet the same clocks.

--search tries every kernel of algorithm 66 that does not split sums, too: tiles, clusters and custom options that the library takes for the
product, in so many seconds for all products, of which the fastest nine then take turns with the offers. "place" is -1 for them.
"""

from __future__ import annotations

import argparse
import ctypes as c
import json
import random
import time

import torch

# tokens, and (in, out) features of a layer's matrices
MODELS = {
    "0.6B": (32768, ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))),
    "1.7B": (16384, ((2048, 4096), (2048, 2048), (2048, 12288), (6144, 2048))),
    "wide": (8192, ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))),
    "124M": (65536, ((768, 2304), (768, 768), (768, 4096), (2048, 768))),
    "67M": (8192, ((384, 1152), (384, 384), (384, 3072), (1536, 384))),
    "0.5B": (16384, ((896, 1152), (896, 896), (896, 9728), (4864, 896))),
    "head": (4096, ((1024, 151936),)),
    "head 124M": (13312, ((768, 50256),)),
}
WORKSPACE = 32 << 20
CLUSTERS = (2, 3, 5)  # 1x1, 2x1 and 1x2
TILE_IDS, CUSTOM_OPTION_MAX = 6, 7  # what an algorithm can do
ATTRIBUTES = dict(algorithm=0, tile=1, splits=2, custom=5, stages=6, cluster=8)
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}


class Algorithm(c.Structure):
    _fields_ = (("data", c.c_uint64 * 8),)


class Offer(c.Structure):
    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", c.c_size_t),
        ("status", c.c_int),
        ("waves", c.c_float),
        ("reserved", c.c_int * 4),
    )


def library() -> c.CDLL:
    """The one that PyTorch has opened."""
    x = torch.randn(8, 8, device="cuda", dtype=torch.bfloat16)
    torch.mm(x, x)
    with open("/proc/self/maps") as maps:
        path = next(line.split()[-1] for line in maps if "libcublasLt.so" in line)
    lt = c.CDLL(path)
    lt.cublasLtGetVersion.restype = c.c_size_t
    print(f"{torch.cuda.get_device_name()}, cuBLASLt {lt.cublasLtGetVersion()}")
    return lt


def call(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt: status {status}")


class Product:
    """C = op(A) op(B), row-major [m, n]; A is stored [k, m] where trans_a, B [n, k] where trans_b."""

    def __init__(self, lt, handle, m: int, n: int, k: int, trans_a: int, trans_b: int, dtype, out, beta: float) -> None:
        self.lt, self.handle, self.sizes, self.beta = lt, handle, (m, n, k), beta
        self.a = torch.randn((k, m) if trans_a else (m, k), device="cuda").to(dtype)
        self.b = (torch.randn((n, k) if trans_b else (k, n), device="cuda") * 0.02).to(dtype)
        self.c = torch.zeros(m, n, device="cuda", dtype=out)
        self.space = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
        self.what, self.wish = c.c_void_p(), c.c_void_p()
        call(lt.cublasLtMatmulDescCreate(c.byref(self.what), c.c_int(68), c.c_int(0)))
        for attribute, value in ((3, trans_b), (4, trans_a)):  # row-major: B is cuBLAS' left operand
            word = c.c_int32(value)
            call(lt.cublasLtMatmulDescSetAttribute(self.what, attribute, c.byref(word), c.c_size_t(4)))
        self.of_a, self.of_b, self.of_c = map(self.layout, (self.a, self.b, self.c))
        call(lt.cublasLtMatmulPreferenceCreate(c.byref(self.wish)))
        words = [(1, c.c_uint64(WORKSPACE)), (3, c.c_uint32(2 | 4 * (out == torch.float32)))]
        words += [(5 + i, c.c_uint32(16)) for i in range(4)]  # alignments
        for attribute, word in words:
            call(
                lt.cublasLtMatmulPreferenceSetAttribute(self.wish, attribute, c.byref(word), c.c_size_t(c.sizeof(word)))
            )

    def layout(self, x) -> c.c_void_p:
        made = c.c_void_p()
        rows, cols = x.shape
        call(
            self.lt.cublasLtMatrixLayoutCreate(
                c.byref(made), TYPES[x.dtype], c.c_uint64(cols), c.c_uint64(rows), c.c_int64(cols)
            )
        )
        return made

    def offers(self, most: int) -> list[Offer]:
        room, found = (Offer * most)(), c.c_int()
        call(
            self.lt.cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                self.what,
                self.of_b,
                self.of_a,
                self.of_c,
                self.of_c,
                self.wish,
                most,
                room,
                c.byref(found),
            )
        )
        return [offer for offer in room[: found.value] if offer.status == 0]

    def run(self, offer: Offer) -> int:
        one, beta = c.c_float(1), c.c_float(self.beta)
        a, b, out, space = (c.c_void_p(x.data_ptr()) for x in (self.a, self.b, self.c, self.space))
        stream = c.c_void_p(torch.cuda.current_stream().cuda_stream)
        return self.lt.cublasLtMatmul(
            self.handle, self.what, c.byref(one), b, self.of_b, a, self.of_a, c.byref(beta), out, self.of_c, out,
            self.of_c, c.byref(offer.algorithm), space, c.c_size_t(WORKSPACE), stream,
        )  # fmt: skip

    def attributes(self, offer: Offer) -> dict[str, int]:
        found = {}
        for name, attribute in ATTRIBUTES.items():
            word, size = c.c_uint32(0), c.c_size_t()
            for nbytes in (4, 2):  # two of them have 16 bits
                if not self.lt.cublasLtMatmulAlgoConfigGetAttribute(
                    c.byref(offer.algorithm), attribute, c.byref(word), c.c_size_t(nbytes), c.byref(size)
                ):
                    break
            found[name] = word.value
        return found

    def able(self, offer: Offer, what: int) -> list[int]:
        size = c.c_size_t()
        of = c.byref(offer.algorithm)
        self.lt.cublasLtMatmulAlgoCapGetAttribute(of, what, None, c.c_size_t(0), c.byref(size))
        room = (c.c_int32 * max(1, size.value // 4))()
        call(self.lt.cublasLtMatmulAlgoCapGetAttribute(of, what, room, c.c_size_t(size.value), c.byref(size)))
        return list(room)

    def other(self, offer: Offer, tile: int, custom: int, cluster: int) -> Offer | None:
        """The kernel of these numbers, without a split of the sums; None where the library does not take it."""
        made, result = Offer(), Offer()
        c.memmove(c.byref(made), c.byref(offer), c.sizeof(Offer))
        for attribute, value, nbytes in ((1, tile, 4), (5, custom, 4), (8, cluster, 2), (2, 1, 4), (3, 0, 4)):
            word = c.c_uint32(value)
            put = self.lt.cublasLtMatmulAlgoConfigSetAttribute
            if put(c.byref(made.algorithm), attribute, c.byref(word), c.c_size_t(nbytes)):
                return None
        check = self.lt.cublasLtMatmulAlgoCheck
        layouts = self.of_b, self.of_a, self.of_c, self.of_c
        return None if check(self.handle, self.what, *layouts, c.byref(made.algorithm), c.byref(result)) else made

    def timed(self, offer: Offer, repeats: int) -> float:
        """Milliseconds of a call."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            if self.run(offer):
                return float("inf")
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / repeats

    def searched(self, offers: list[Offer], seconds: float) -> list[Offer]:
        """The fastest nine of what is no offer, each timed once."""
        ours = [offer for offer in offers if self.attributes(offer)["algorithm"] == 66]
        if not ours:
            return []
        end, seen = time.monotonic() + seconds, {tuple(self.attributes(offer).values()) for offer in offers}
        options = range(self.able(ours[0], CUSTOM_OPTION_MAX)[0] + 1)
        places = [(t, o, s) for t in self.able(ours[0], TILE_IDS) for o in options for s in CLUSTERS]
        random.Random(0).shuffle(places)
        found: list[tuple[float, int, Offer]] = []
        for place in places:
            if time.monotonic() > end:
                break
            made = self.other(ours[0], *place)
            if made is not None and (key := tuple(self.attributes(made).values())) not in seen:
                seen.add(key)
                self.timed(made, 1)
                found.append((self.timed(made, 2), len(found), made))
        return [offer for _, _, offer in sorted(found, key=lambda one: one[:2])[:9]]


def picked(rows: list[dict], m: int, n: int, k: int) -> dict:
    """pick_offer of cuda/gemm/cublas_choice.cuh."""
    if k <= 6144 and m * n >= 1 << 22:
        for row in rows:
            if row["place"] < 0 or (row["algorithm"] == 66 and row["splits"] != 1):
                break
            if row["algorithm"] == 66 and row["custom"] < 4:
                return row
    return rows[0]


def compare(lt, handle, name: str, sizes, dtype, out, beta: float, args, search: float) -> dict:
    m, n, k, trans_a, trans_b = sizes
    product = Product(lt, handle, m, n, k, trans_a, trans_b, dtype, out, beta)
    rows, first = [], None
    offers = product.offers(args.offers)
    more = product.searched(offers, search) if search else []
    for place, offer in (*enumerate(offers), *((-1, offer) for offer in more)):
        product.c.zero_()
        if product.run(offer):
            continue
        first = product.c.clone() if first is None else first
        rows.append(dict(place=place, offer=offer, bits=torch.equal(first, product.c), **product.attributes(offer)))
    flops = 2.0 * m * n * k
    repeats = max(2, min(20, int(6e11 / flops) + 1))
    times = [[] for _ in rows]
    for _ in range(args.rounds):
        for row, spent in zip(rows, times, strict=True):
            product.run(row["offer"])
            spent.append(product.timed(row["offer"], repeats))
    for row, spent in zip(rows, times, strict=True):
        row["ms"] = sorted(spent)[(len(spent) - 1) // 2]
        del row["offer"]
    best, pick = min(rows, key=lambda row: row["ms"]), picked(rows, m, n, k)

    def told(row: dict) -> str:
        kernel = f"{row['tile']},{row['custom']},{row['cluster']},{row['splits']}"
        return f"#{row['place']} {row['ms']:.3f} {flops / row['ms'] / 1e9:.0f} ({kernel})"

    same = sum(row["bits"] for row in rows)
    print(
        f"{name:24} {m}x{n}x{k} bits {same}/{len(rows)}  first {told(rows[0])}  picked {told(pick)} "
        f"{rows[0]['ms'] / pick['ms']:.3f}x{'' if pick['bits'] else ' OTHER BITS'}  best {told(best)}",
        flush=True,
    )
    return dict(name=name, m=m, n=n, k=k, out=str(out), beta=beta, picked=pick["place"], offers=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--offers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--search", type=float, default=0.0, help="seconds for all products")
    parser.add_argument("--json")
    args = parser.parse_args()
    lt, handle, dtype = library(), c.c_void_p(), getattr(torch, args.dtype)
    call(lt.cublasLtCreate(c.byref(handle)))
    found = []
    models = args.models.split(",")
    search = args.search / sum(3 * len(MODELS[model][1]) for model in models)
    for model in models:
        tokens, matrices = MODELS[model]
        wide = torch.float32 if model.startswith("head") else dtype  # gradients of a head in chunks are sums of float32
        for width, out in matrices:
            for name, sizes, result, beta in (
                ("forward", (tokens, out, width, 0, 1), dtype, 0.0),
                ("dx", (tokens, width, out, 0, 0), wide, 0.0),
                ("dW", (out, width, tokens, 1, 0), wide, float(wide == torch.float32)),
            ):
                name = f"{model} {width}->{out} {name}"
                found.append(compare(lt, handle, name, sizes, dtype, result, beta, args, search))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
