"""check VARIANT... | time VARIANT...: libraries in $LIBS. Correctness against float64, then times in turns."""
import ctypes as c, os, sys, time, json, subprocess
import torch
LIBS = os.environ["LIBS"]
PLAIN, ADD, SWIGLU, BWD, ROWS = range(5)
P = c.c_void_p
def load(name):
    lib = c.CDLL(f"{LIBS}/{name}.so")
    lib.product.argtypes = [c.c_int, c.c_int, P, P, P, P, P, c.c_long, c.c_long, c.c_long, c.c_int, P]
    if name == "P192x2":
        lib.swiglu.argtypes = [c.c_int, c.c_int, P, P, P, c.c_long, c.c_long, P]
    return lib
def run(lib, kind, out, a, b, N, h=None, d=None, group=4):
    p = lambda t: None if t is None else t.data_ptr()
    e = lib.product(int(a.dtype == torch.float16), kind, p(out), p(h), p(a), p(b), p(d), a.shape[0], N, a.shape[1], group,
                    torch.cuda.current_stream().cuda_stream)
    assert e == 0, f"launch: {e}"
def guarded(rows, cols, dtype):
    t = torch.full((rows + 64, cols), 7.0, device="cuda", dtype=dtype)
    return t, t[:rows]
def near(name, got, ref, floor, eps):
    """|got - ref| <= one rounding of ref and `floor`; NaN fails"""
    err = (got.double() - ref).abs() / (ref.abs() * eps + floor)
    worst = err.max().item()
    ok = bool((err <= 1).all().item())
    return ok, f"{name} {worst:.2f}"
def check(name):
    lib = load(name); out = []; good = True
    def say(ok, text):
        nonlocal good
        good = good and ok; out.append(("" if ok else "WRONG ") + text)
    dtypes = [torch.bfloat16] + ([torch.float16] if name == "P192x2" else [])
    for dtype in dtypes:
        eps = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
        for M, F, K in ((1, 8, 8), (300, 200, 72), (1025, 3072, 1024), (2000, 1000, 520)):
            torch.manual_seed(M)
            tag = f"{M}x{F}x{K}{'h' if dtype == torch.float16 else ''}"
            x = torch.randn(M, K, device="cuda", dtype=dtype); w = torch.randn(2 * F, K, device="cuda", dtype=dtype) * K**-0.5
            whole, gu = guarded(M, 2 * F, dtype); hwhole, h = guarded(M, F, dtype)
            run(lib, SWIGLU, gu, x, w, F, h=h); torch.cuda.synchronize()
            ref = x.double() @ w.double().T
            floor = K * 2.0**-24 * (x.double().abs() @ w.double().abs().T)
            say(*near(f"fwd {tag}", gu, ref, floor, eps))
            g, u = gu[:, :F].double(), gu[:, F:].double()
            say(*near("h", h, g * torch.sigmoid(g) * u, 1e-5 * (g * u).abs() + 1e-30, eps))
            say(bool((whole[M:] == 7).all() and (hwhole[M:] == 7).all()), "guard")
            gu2, h2 = torch.empty_like(gu), torch.empty_like(h)
            run(lib, SWIGLU, gu2, x, w, F, h=h2, group=1)
            say(torch.equal(gu, gu2) and torch.equal(h, h2), "bits")
            if F % 8 == 0:
                whole, y = guarded(M, 2 * F, dtype)
                run(lib, PLAIN, y, x, w, 2 * F)
                say(torch.equal(y, gu) and bool((whole[M:] == 7).all()), "plain")
                out.append("lib" + "≠="[torch.equal(y, x @ w.T)])
            if name == "P192x2":
                lib.swiglu(int(dtype == torch.float16), 0, h2.data_ptr(), gu.data_ptr(), None, M, F, torch.cuda.current_stream().cuda_stream)
                say(torch.equal(h, h2), "swiglu bits")
            dy = torch.randn(M, K, device="cuda", dtype=dtype); v = torch.randn(K, F, device="cuda", dtype=dtype) * K**-0.5
            before = gu.clone(); whole, gu = guarded(M, 2 * F, dtype); gu.copy_(before)
            run(lib, BWD, gu, dy, v, F); torch.cuda.synchronize()
            ref = dy.double() @ v.double(); dh = ref
            floor = K * 2.0**-24 * (dy.double().abs() @ v.double().abs()) + ref.abs() * eps  # dh is rounded
            s = torch.sigmoid(g); t = (u * s * (1 + g * (1 - s)))
            e1 = 4e-5 * (dh * u).abs() + 1e-30
            say(*near("dgate", gu[:, :F], dh * t, floor * t.abs() * 1.01 + e1, eps))
            say(*near("dup", gu[:, F:], dh * g * s, floor * (g * s).abs() * 1.01 + 4e-5 * (dh * g).abs() + 1e-30, eps))
            say(bool((whole[M:] == 7).all()), "guard")
            again = before.clone(); run(lib, BWD, again, dy, v, F, group=1)
            say(torch.equal(again, gu), "bits")
            if name == "P192x2":
                y = torch.empty(M, F, device="cuda", dtype=dtype); run(lib, ROWS, y, dy, v, F)
                again = torch.empty_like(before)
                lib.swiglu(int(dtype == torch.float16), 1, again.data_ptr(), before.data_ptr(), y.data_ptr(), M, F, torch.cuda.current_stream().cuda_stream)
                say(torch.equal(again, gu), "bwd bits"); out.append("lib" + "≠="[torch.equal(y, dy @ v)])
                b = torch.randn(M, F, device="cuda", dtype=dtype); w1 = w[:F]; y = torch.empty_like(b); z = torch.empty_like(b)
                run(lib, PLAIN, y, x, w1, F); run(lib, ADD, z, x, w1, F, d=b)
                say(torch.equal(z, y + b), "add")
                b2 = b.clone(); run(lib, ADD, b2, x, w1, F, d=b2); say(torch.equal(b2, z), "add in place")
            torch.cuda.synchronize()
    print(name, "right" if good else "WRONG", "|", " ".join(out) if not good or name == "P192x2" else " ".join(out)[-300:])
    return good
def timed(names, seconds):
    M, C, F = 32768, 1024, 3072
    bf = dict(device="cuda", dtype=torch.bfloat16); torch.manual_seed(1)
    sets = 3
    x = [torch.randn(M, C, **bf) for _ in range(sets)]; w = torch.randn(2 * F, C, **bf) * 0.02; v = torch.randn(C, F, **bf) * 0.02
    gu = [torch.randn(M, 2 * F, **bf) for _ in range(sets)]; h = torch.empty(M, F, **bf); wo = torch.randn(C, 2048, **bf) * 0.02
    y2 = torch.randn(M, 2048, **bf); r = torch.randn(M, C, **bf); h1 = torch.empty(M, C, **bf); yf = [torch.randn(M, F, **bf) for _ in range(2)]
    libs = {n: load(n) for n in names}
    st = lambda: torch.cuda.current_stream().cuda_stream
    jobs = {}
    def job(name, f, flop): jobs[name] = (f, flop)
    big, half = 2 * M * C * 2 * F, 2 * M * C * F
    job("torch linear", lambda i: torch.mm(x[i % sets], w.T, out=gu[i % sets]), big)
    job("torch dh", lambda i: torch.mm(x[i % sets], v, out=h), half)
    sync = lambda: None
    try:
        import xtrain as xt
        from xtrain import _C
        xt.cuda.synchronize(); torch.cuda.synchronize()
        X = [xt.from_dlpack(t) for t in x]; W = xt.from_dlpack(w); V = xt.from_dlpack(v); Y2 = xt.from_dlpack(y2); WO = xt.from_dlpack(wo)
        _C.swiglu(_C.linear(X[0], W)); sync = xt.cuda.synchronize; sync()
        job("xt linear", lambda i: _C.linear(X[i % sets], W), big)
        job("xt linear+swiglu", lambda i: _C.swiglu(_C.linear(X[i % sets], W)), big)
        job("xt dh", lambda i: _C.matmul(X[i % sets], V), half)
        job("xt o_proj", lambda i: _C.linear(Y2, WO), 2 * M * C * 2048)
    except Exception as e: print("without xtrain:", repr(e)[:300])
    l = load("P192x2")
    try:
        import gpu_algorithms as ga
        lt, handle = ga.library(), c.c_void_p(); ga.call(lt.cublasLtCreate(c.byref(handle)))
        def picked(m, n, k, tb):
            p = ga.Product(lt, handle, m, n, k, 0, tb, torch.bfloat16, torch.bfloat16, 0.0)
            o = ga.picked([dict(offer=o, **p.attributes(o)) for o in p.offers(8)], m, n, k)["offer"]
            return p, lambda: p.run(o)
        pf, ff = picked(M, 2 * F, C, 1); pd, fd = picked(M, F, C, 0); po, fo = picked(M, C, 2048, 1)
        job("picked linear", lambda i: ff(), big); job("picked dh", lambda i: fd(), half); job("picked o_proj", lambda i: fo(), 2 * M * C * 2048)
        job("picked linear, swiglu", lambda i: (ff(), l.swiglu(0, 0, h.data_ptr(), pf.c.data_ptr(), None, M, F, st())), big)
        job("picked dh, bwd swiglu", lambda i: (fd(), l.swiglu(0, 1, gu[i % sets].data_ptr(), gu[i % sets].data_ptr(), pd.c.data_ptr(), M, F, st())), half)
    except Exception as e: print("without picks:", repr(e)[:300])
    if True:
        if "P192x2" in libs:
            job("swiglu fwd", lambda i: l.swiglu(0, 0, h.data_ptr(), gu[i % sets].data_ptr(), None, M, F, st()), 0)
            job("swiglu bwd", lambda i: l.swiglu(0, 1, gu[i % sets].data_ptr(), gu[i % sets].data_ptr(), yf[i % 2].data_ptr(), M, F, st()), 0)
            job("P192x2 dh plain", lambda i: run(l, ROWS, h, x[i % sets], v, F), half)
            job("P192x2 o_proj", lambda i: run(l, PLAIN, h1, y2, wo, C), 2 * M * C * 2048)
            job("P192x2 o_proj+add", lambda i: run(l, ADD, h1, y2, wo, C, d=r), 2 * M * C * 2048)
        for n, lib in libs.items():
            for g in (1, 4, 16) if n in ("P192x2", "C256x2") else (4,):
                job(f"{n} plain g{g}", lambda i, lib=lib, g=g: run(lib, PLAIN, gu[i % sets], x[i % sets], w, 2 * F, group=g), big)
                job(f"{n} fwd g{g}", lambda i, lib=lib, g=g: run(lib, SWIGLU, gu[i % sets], x[i % sets], w, F, h=h, group=g), big)
                job(f"{n} bwd g{g}", lambda i, lib=lib, g=g: run(lib, BWD, gu[i % sets], x[i % sets], v, F, group=g), half)
        def burst(f, count):
            sync()
            torch.cuda.synchronize(); t = time.perf_counter()
            for i in range(count): f(i)
            sync()
            torch.cuda.synchronize(); return (time.perf_counter() - t) / count * 1e3
        times = {n: [] for n in jobs}; broken = set()
        for t in gu: t.normal_()
        end = time.time() + seconds; rounds = 0
        while time.time() < end and rounds < 9:
            for n, (f, _) in jobs.items():
                if "bwd" in n:  # gate and up shrink: drawn anew now and then
                    for t in gu: t.normal_()
                if rounds == 0: burst(f, 3)
                times[n].append(burst(f, 40))
            rounds += 1
    print(f"{torch.cuda.get_device_name()}, {rounds} rounds; ms median (min-max), TFLOP/s")
    for n, (f, flop) in jobs.items():
        t = sorted(times[n]); m = t[len(t) // 2]
        print(f"{n:20s} {m:.4f} ({t[0]:.4f}-{t[-1]:.4f}) {flop / m / 1e9:.0f}")
if __name__ == "__main__":
    if sys.argv[1] == "check":
        sys.exit(0 if check(sys.argv[2]) else 1)
    timed(sys.argv[3:], float(sys.argv[2]))
