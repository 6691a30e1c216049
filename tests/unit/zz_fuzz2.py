import random, time, threading, os, sys
from collections import Counter
from tests.unit.crew import *
from elastic_ring.runtime.groups import translated
from tests.unit.test_groups import PAIR
def loop(me, op):
    parked=me.parked
    t=torch.ones(64); n=0; w=me.groups.world; o=1-me.rank
    try:
        with translated(me.connector):
            while True:
                n+=1
                if op=="ar": w.allreduce([t]).wait()
                elif op=="ag": w.allgather([[torch.empty(64),torch.empty(64)]],[t]).wait()
                else:
                    a=w.send([t],o,3); b=w.recv([torch.empty(64)],o,3); a.wait(); b.wait()
    except Exception as e: r=type(e).__name__
    parked.set()
    return r,n
def fresh(me): me.parked=threading.Event()
def strike(me, delay):
    time.sleep(delay); return me.connector.abort_until(me.parked, 5)
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
        elif mode=="kill":
            time.sleep(d); p.kill(1); 
            time.sleep(0.05)
            good=p.now(0,strike,0); stuck=not good
        if stuck:
            import subprocess
            for k in (0,1):
                print(k, subprocess.run(f'ls -l /proc/{p.processes[k].pid}/fd | grep -c socket; timeout 100 gdb -p {p.processes[k].pid} -batch -ex "thread apply all bt 16" 2>/dev/null | grep -E "^Thread|gloo|c10d" | grep -v -i runloop | cut -c1-150; ls -l /proc/{p.processes[k].pid}/fd | grep socket; ss -tanp | grep pid={p.processes[k].pid},',shell=True,capture_output=True,text=True).stdout)
        c["stuck" if stuck else "ok"]+=1
        if not stuck:
            c[str(p.result(0)[0])]+=1
            if mode!="kill": p.result(1)
        if stuck: break
        if stuck or mode=="kill": p.close(); p=None
    print(op,mode,c,round(time.time()-t0))
    if p: p.close()
