import asyncio, time, sys
import aiohooks as ah
from aiohooks.dispatch.calls import only_if
from tests.benchmarks.rows_hooks import NoOpHook, graph_of
class Cond(ah.SessionRunHook):
    order=99
    @only_if("c")
    async def after_run(self, a, b): await asyncio.sleep(0)
    def c(self, a, b): return False
class Plain(ah.SessionRunHook):
    order=99
    async def after_run(self, a, b): pass
class Plain0(ah.SessionRunHook):
    async def after_run(self, a, b): pass
async def d(e): pass
class EffNoRec(ah.EffectsHook):
    async def after_create_session(self, s, c):
        await super().after_create_session(s,c)
        from aiohooks.session.coordinator import owner_of
        owner_of(c).state.recording=None
mk={"6noop":lambda:[NoOpHook() for _ in range(6)],"5noop":lambda:[NoOpHook() for _ in range(5)],
 "cond":lambda:[NoOpHook() for _ in range(5)]+[Cond()],"plain99":lambda:[NoOpHook() for _ in range(5)]+[Plain()],"plain0":lambda:[NoOpHook() for _ in range(5)]+[Plain0()],
 "eff":lambda:[NoOpHook() for _ in range(5)]+[ah.EffectsHook({"p":d,"c":d},when="commit")],"effnorec":lambda:[NoOpHook() for _ in range(5)]+[EffNoRec({"p":d,"c":d},when="commit")]}
async def main():
    ss={}
    for k,f in mk.items():
        s=ah.AsyncMonitoredSession(graph_of(["loss"]), f()); await s.__aenter__(); ss[k]=s
    best={k:[] for k in ss}
    for r in range(300):
        for k,s in ss.items():
            t=time.perf_counter()
            for _ in range(200): await s.run("train",{"batch":1.0})
            best[k].append((time.perf_counter()-t)/200*1e6)
    for k,b in best.items(): b.sort(); print(k, round(b[len(b)//10],3))
    for s in ss.values(): await s.aclose()
asyncio.run(main())
