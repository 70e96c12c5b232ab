import sys, time, torch, traceback
sys.path.insert(0, "tests"); sys.path.insert(0, "src")
import transformers
print(torch.__version__, transformers.__version__, torch.cuda.get_device_name())
from models.conftest import build, tokens
from models.test_cache import EVERY_LAYER
torch._dynamo.config.recompile_limit = 64
which = sys.argv[1:]
for e in EVERY_LAYER:
    name = e["mixer"] + (f"-{e['window']}" if "window" in e else "")
    if which and name not in which: continue
    torch._dynamo.reset()
    m = build([e], hidden_size=64).cuda()
    ids = tokens(2, 24).cuda(); mask = torch.ones_like(ids); mask[0, :5] = 0
    for chunk in (None, 8):
        t0 = time.time()
        try:
            o = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, prefill_chunk_size=chunk)
            a = m.generate(ids, **o)
            b = m.generate(ids, cache_implementation="static", disable_compile=True, **o)
            torch._dynamo.utils.counters.clear()
            c = m.generate(ids, cache_implementation="static", **o)
            g1 = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            d = m.generate(ids, cache_implementation="static", **o)
            g2 = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            br = dict(torch._dynamo.utils.counters["graph_break"])
            sk = torch._dynamo.utils.counters["inductor"].get("cudagraph_skips")
            print(name, chunk, "eager", torch.equal(a, b), "compiled", torch.equal(a, c), torch.equal(a, d), "graphs", g1, g2, "breaks", len(br), "cudagraph_skips", sk, f"{time.time()-t0:.0f}s", flush=True)
            for k in br: print("   break:", k[:300])
        except Exception as ex:
            print(name, chunk, "FAIL", type(ex).__name__, str(ex)[:500], f"{time.time()-t0:.0f}s", flush=True)
