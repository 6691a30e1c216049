import random, time, threading, os, sys
from collections import Counter
from tests.unit.crew import *
from elastic_ring.runtime.groups import translated
from tests.unit.test_groups import PAIR
SIZE=int(os.environ.get("SIZE","64"))
def loop(me, op):
    parked=me.parked
    t=torch.ones(SIZE); n=0; w=me.groups.world; o=1-me.rank
    try:
        with translated(me.connector):
            while True:
                n+=1
                if op=="ar": w.allreduce([t]).wait()
                elif op=="ag": w.allgather([[torch.empty(SIZE),torch.empty(SIZE)]],[t]).wait()
                else:
                    a=w.send([t],o,3); b=w.recv([torch.empty(SIZE)],o,3); a.wait(); b.wait()
    except Exception as e: r=type(e).__name__
    parked.set()
    return r,n
def fresh(me): me.parked=threading.Event()
def strike(me, delay):
    time.sleep(delay); return me.connector.abort_until(me.parked, 2)
if __name__=="__main__":
    from tests.unit.zz_fuzz2 import loop, strike, fresh
    op,mode=sys.argv[1:3]
    c=Counter(); random.seed(1)
    t0=time.time(); p=None
    for i in range(int(sys.argv[3])):
        if p is None: p=Crew(2)
        p.all(connect, p.meeting(), PAIR)
        p.all(fresh)
        for k in (0,1): p.start(k, loop, op)
        d=random.random()*0.004
        stuck=False
        if mode=="abort0":
            good=p.now(0, strike, d); stuck = not good
            good=p.now(1, strike, 0); stuck |= not good
        elif mode=="both":
            for k in (0,1): p._ends[k].send(("now", strike, (d,)))
            stuck = not p._answer(0,"now"); stuck |= not p._answer(1,"now")
        elif mode=="kill":
            time.sleep(d); p.kill(1); 
            time.sleep(0.05)
            good=p.now(0,strike,0); stuck=not good
        if stuck:
            pass
        c["stuck" if stuck else "ok"]+=1
        if not stuck:
            c[str(p.result(0)[0])]+=1
            if mode!="kill": p.result(1)
        if 1: p.close(); p=None
    print(op,mode,c,round(time.time()-t0))
    if p: p.close()
